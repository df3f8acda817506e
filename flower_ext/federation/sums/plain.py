"""Sums of contributions that arrive in the clear, bounded and noised as the plan says.

The server adds each contribution when it arrives, and drops it. Worker processes may each add up
their part first; their sums are added like contributions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from flwr.app import Message

from flower_ext.federation.records import Update
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.federation.uploads import in_parts
from flower_ext.privacy.mechanisms.plan import (
    Aggregate,
    RoundMechanism,
    times_examples,
    weighted_mean,
)


class PlainSum(Summation):
    """Sums that the server computes from the clients' single contributions."""

    def open(self, opening: Opening) -> OpenSum:
        """Begin the sum of one round; nobody needs to be asked before."""
        return _OpenPlainSum(self.mechanism, opening)


class _OpenPlainSum(OpenSum):
    def __init__(self, mechanism: RoundMechanism, opening: Opening) -> None:
        self._mechanism, self._opening = mechanism, opening
        self.cohort = opening.cohort

    def read(self, reply: Message) -> Update:
        return self._opening.read(reply)

    def aggregate(self, contributions: Iterable[tuple[int, Update]]) -> Aggregate:
        like = self._opening.like
        aggregate = partial(
            self._mechanism.aggregate,
            cohort_size=len(self.cohort.asked),
            noise=self._opening.noise,
        )
        if not self._mechanism.weighs_examples:
            return aggregate(in_parts(update.arrays for _, update in contributions), like=like)
        uploads = (
            times_examples(update.arrays, update.metrics["num-examples"])
            for _, update in contributions
        )
        return weighted_mean(lambda wider: aggregate(uploads, like=wider), like=like)


def adds_only(summation: Summation) -> bool:
    """Return True if a process may replace the contributions that it holds by their sum."""
    mechanism = summation.mechanism
    return (
        isinstance(summation, PlainSum)
        and not mechanism.weighs_examples
        and not mechanism.bounds_models
    )
