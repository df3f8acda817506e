"""Sums of contributions that arrive in the clear, bounded and noised as the plan says.

The server adds each contribution when it arrives, and drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import Message

from flower_ext.federation.records import Update
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundMechanism, divided
from flower_ext.privacy.mechanisms.updates import as_float64, in_float64


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
            cohort_size=len(self.cohort.partitions),
            noise=self._opening.noise,
        )
        if not self._mechanism.weighs_examples:
            return aggregate((update.arrays for _, update in contributions), like=like)
        sizes: list[float] = []

        def weighted() -> Iterator[Mapping[str, Any]]:
            for _, update in contributions:
                sizes.append(size := update.metrics["num-examples"])
                yield {name: as_float64(array) * size for name, array in update.arrays.items()}

        mean = aggregate(weighted(), like=in_float64(like))
        # The mean of n weighted uploads becomes their sum over all examples.
        return replace(mean, value=divided(mean.value, sum(sizes) / mean.answered, like))
