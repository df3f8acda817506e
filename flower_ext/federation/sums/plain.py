"""Sums of contributions that arrive in the clear, bounded and noised as the plan says.

The server adds each contribution when it arrives, and drops it.
"""

from __future__ import annotations

from dataclasses import replace

from flwr.app import Message

from flower_ext.federation.records import Update
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundMechanism, divided
from flower_ext.privacy.mechanisms.updates import as_float64, in_float64


class PlainSum(Summation):
    """Sums that the server computes from the clients' single contributions."""

    def open(self, opening: Opening) -> OpenSum:
        """Begin the sum of one round, without a message to the clients."""
        return _OpenPlainSum(self.mechanism, opening)


class _OpenPlainSum(OpenSum):
    def __init__(self, mechanism: RoundMechanism, opening: Opening) -> None:
        self._mechanism, self._opening = mechanism, opening
        self.cohort = opening.cohort
        like = opening.like
        self._summed = mechanism.begin_sum(in_float64(like) if mechanism.weighs_examples else like)
        self._examples = 0.0

    def read(self, reply: Message) -> Update:
        return self._opening.read(reply)

    # Floating-point sums depend on the order, so add in the order of partitions, not of arrival.
    def add(self, update: Update) -> None:
        arrays = update.arrays
        if self._mechanism.weighs_examples:
            size = update.metrics["num-examples"]
            self._examples += size
            arrays = {name: as_float64(array) * size for name, array in arrays.items()}
        self._summed.add(arrays)

    def close(self) -> Aggregate:
        size, noise = len(self.cohort.partitions), self._opening.noise
        mean = self._mechanism.aggregate(self._summed, cohort_size=size, noise=noise)
        del self._summed  # as large as a model, and of no more use
        if not self._mechanism.weighs_examples:
            return mean
        # The mean of n weighted uploads becomes their sum over all examples.
        value = divided(mean.value, self._examples / mean.answered, self._opening.like)
        return replace(mean, value=value)
