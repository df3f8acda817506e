"""Devices that differ in speed, as the Upcycled-FL and FedProx papers simulate them."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def shortened(training: LocalTraining, how_far: float | None) -> LocalTraining:
    """What a straggler completes of ``training``; everything where it is none."""
    if how_far is None or training.epochs < 2:
        return training
    return replace(training, epochs=1 + math.floor(how_far * (training.epochs - 1)))
