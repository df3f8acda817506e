"""Simulated devices of different speed, as in the Upcycled-FL and FedProx papers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Devices that complete only some of their E local epochs.

    In every round each device straggles with probability ``ratio``, independently of the others,
    and runs a number of epochs drawn uniformly from 1 … E−1. In the papers an exact share of each
    cohort straggles. That would let one client change which others straggle, and so their uploads,
    which no bound on that client's own upload covers.

    Parameters
    ----------
    ratio : float
        Probability in [0, 1].

    Raises
    ------
    InvalidValue
        ``ratio`` is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidValue(f"ratio={self.ratio!r}: expected a number in [0, 1]")

    def draw(
        self, cohort: Sequence[int], population: int, rng: np.random.Generator
    ) -> dict[int, float]:
        """Return, for each straggler of a cohort, a number in [0, 1): its progress.

        Parameters
        ----------
        cohort : Sequence[int]
            Numbers of clients, below ``population``.
        population : int
            Number of all clients.
        rng : numpy.random.Generator
            Generator of this round. The function draws two numbers for every client, in order, so
            that a client's numbers do not depend on the cohort.
        """
        drawn = rng.random((population, 2))
        return {i: float(drawn[i, 1]) for i in cohort if drawn[i, 0] < self.ratio}

    @staticmethod
    def check(trainings: Iterable[LocalTraining]) -> None:
        """Refuse trainings that no straggler could stop early.

        Raises
        ------
        InvalidValue
            No training is counted in epochs.
        """
        if not any(t.steps is None and not t.tolerance for t in trainings):
            raise InvalidValue(
                "stragglers: expected local training that is counted in epochs, of which a "
                "straggler completes some; give epochs in place of steps or a tolerance, or "
                "stragglers=None"
            )


def shortened(training: LocalTraining, how_far: float | None) -> LocalTraining:
    """Return the part of ``training`` that a straggler completes, in whole epochs.

    A client that does not straggle (``how_far`` is None), and training that epochs do not count,
    stay as they are.
    """
    if how_far is None or training.epochs < 2:
        return training
    return replace(training, epochs=1 + math.floor(how_far * (training.epochs - 1)))
