"""Simulated devices of different speed, as in the Upcycled-FL and FedProx papers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_ext.checks import Checked, FractionOrZero
from flower_ext.errors import InvalidValue
from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Stragglers(Checked):
    """Devices that complete only some of their E local epochs.

    A straggler runs a number of epochs drawn uniformly from 1 … E−1. By default each device
    straggles with probability ``ratio`` in every round, independently of the others. In the papers
    a fixed fraction of each cohort straggles (``exact``). Then one client's straggling depends on
    the others in the cohort. One client can therefore change the uploads of others, and a bound on
    its own upload does not limit this change. `check` refuses ``exact`` under a private plan.

    Parameters
    ----------
    ratio : float
        Probability, or fraction of a cohort, in [0, 1].
    exact : bool
        If True, the fraction ``ratio`` of each cohort straggles, rounded to whole devices.

    Raises
    ------
    InvalidValue
        ``ratio`` is out of range.
    """

    ratio: FractionOrZero
    exact: bool = False

    def draw(
        self, cohort: Sequence[int], population: int, rng: np.random.Generator
    ) -> dict[int, float]:
        """Return, by client, the progress p of each straggler in a cohort: a number in [0, 1).

        A straggler completes 1 + ⌊p (E − 1)⌋ of its E epochs. ``population`` is the number of all
        clients.
        """
        # Draw two numbers for every client: a client's numbers do not depend on the cohort.
        drawn = rng.random((population, 2))
        slow = [i for i in cohort if drawn[i, 0] < self.ratio]
        if self.exact:
            slow = sorted(cohort, key=lambda i: drawn[i, 0])[: round(self.ratio * len(cohort))]
        return {i: float(drawn[i, 1]) for i in slow}

    def check(self, trainings: Iterable[LocalTraining], *, protects: bool) -> None:
        """Raise an error if no straggler could stop this training early.

        Also raise one if ``exact`` is set although the plan promises privacy (``protects``).
        """
        if self.exact and protects:
            raise InvalidValue(
                "stragglers.exact=True: expected False under a plan with privacy, because the "
                "presence of one client would change which others straggle, and what they upload"
            )
        if not any(t.steps is None and not t.tolerance for t in trainings):
            raise InvalidValue(
                "stragglers: expected local training that is counted in epochs, because a "
                "straggler completes only some epochs; give epochs in place of steps or a "
                "tolerance, or stragglers=None"
            )


def shortened(training: LocalTraining, progress: float | None) -> LocalTraining:
    """Return ``training`` with only those epochs that a straggler completes.

    ``progress`` is in [0, 1) (see `Stragglers.draw`), or None if the client does not straggle.
    Training of fewer than two epochs, or counted in steps, keeps its length.
    """
    if progress is None or training.epochs < 2:
        return training
    return replace(training, epochs=1 + math.floor(progress * (training.epochs - 1)))
