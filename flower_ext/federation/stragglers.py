"""Devices that differ in speed, as the Upcycled-FL and FedProx papers simulate them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Devices that complete only some of their E local epochs: a share of all, in expectation.

    In every round each device straggles with probability ``ratio``, whatever the others do, and
    runs a number of epochs drawn uniformly from 1 … E−1. The papers make an exact share of each
    cohort straggle. Then one client in the cohort changes who else does, and so what others send:
    of that no bound on one client's upload speaks.

    Parameters
    ----------
    ratio : float
        Probability in [0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidValue(f"ratio={self.ratio!r}: expected a number in [0, 1]")

    def draw(
        self, cohort: Sequence[int], population: int, rng: np.random.Generator
    ) -> dict[int, float]:
        """For each straggler of a cohort a number in [0, 1) that says how far it gets.

        Parameters
        ----------
        cohort : Sequence[int]
            Numbers of clients, below ``population``.
        rng : numpy.random.Generator
            Of this round. Two of its numbers belong to each client, in their order, in any cohort.
        """
        drawn = rng.random((population, 2))
        return {i: float(drawn[i, 1]) for i in cohort if drawn[i, 0] < self.ratio}

    @staticmethod
    def check(trainings: Iterable[LocalTraining]) -> None:
        """Refuse what no straggler could stop early.

        Raises
        ------
        ValueError
            No training is counted in epochs.
        """
        if not any(t.steps is None and not t.tolerance for t in trainings):
            raise InvalidValue(
                "stragglers complete some of their epochs, but local training is counted in steps "
                "or runs to a tolerance: give epochs, or stragglers=None"
            )


def shortened(training: LocalTraining, how_far: float | None) -> LocalTraining:
    """What a straggler completes of ``training``: some epochs; all where they do not count it."""
    if how_far is None or training.epochs < 2:
        return training
    return replace(training, epochs=1 + math.floor(how_far * (training.epochs - 1)))
