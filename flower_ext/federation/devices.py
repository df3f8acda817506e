"""Devices that differ in speed, as the Upcycled-FL and FedProx papers simulate them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """A fixed share of every cohort completes only some of its E local epochs.

    Each straggler runs a number of epochs drawn uniformly from 1 … E−1.

    Parameters
    ----------
    ratio : float
        Share of the cohort, in [0, 1]; rounded to whole clients.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio!r}: expected a number in [0, 1]")

    def draw(self, cohort: Sequence[int], rng: np.random.Generator) -> dict[int, float]:
        """For each straggler a number in [0, 1) that says how far it gets."""
        number = math.floor(self.ratio * len(cohort) + 0.5)
        chosen = rng.permutation(np.asarray(cohort, dtype=np.int64))[:number]
        return dict(zip(chosen.tolist(), rng.random(number).tolist(), strict=True))

    @staticmethod
    def check(trainings: Iterable[LocalTraining]) -> None:
        """Refuse what no straggler could stop early.

        Raises
        ------
        ValueError
            No training is counted in epochs.
        """
        if not any(t.steps is None and not t.tolerance for t in trainings):
            raise ValueError(
                "stragglers complete some of their epochs, but local training is counted in steps "
                "or runs to a tolerance: give epochs, or stragglers=None"
            )


def shortened(training: LocalTraining, how_far: float | None) -> LocalTraining:
    """What a straggler completes of ``training``: some epochs; all where they do not count it."""
    if how_far is None or training.epochs < 2:
        return training
    return replace(training, epochs=1 + math.floor(how_far * (training.epochs - 1)))
