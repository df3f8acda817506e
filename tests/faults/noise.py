"""Measure the noise that is really in released sums, while clients drop out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message
from scipy import stats

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.privacy.mechanisms.noised_sum import NoisePlacement
from flower_ext.training import LocalTraining, Task
from tests.faults.grid import NOTHING, FaultyGrid
from tests.faults.worlds import DATA, Net, initial

COHORT = 10
NORM, MULTIPLIER = 0.5, 2.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The noise of released sums, relative to the noise for which the plan accounts."""

    dropout: float
    placement: NoisePlacement
    released: int
    rounds: int
    ratio: float
    """Measured standard deviation over the accounted one; NaN if nothing was released."""
    too_little: float
    """Probability of so little noise if the planned noise is there."""

    @property
    def enough(self) -> bool:
        """Return True unless the noise is significantly too small, at a level of 1 in a million."""
        return self.released == 0 or self.too_little > 1e-6


class LosingGrid(FaultyGrid):
    """A grid that loses each training reply with a given probability."""

    dropout = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages as `InProcessGrid` does, but lose some replies."""
        replies = super().send_and_receive(messages, timeout=timeout)
        return [r for r in replies if not _of_training(r) or self.rng.random() >= self.dropout]


def _of_training(reply: Message) -> bool:
    return reply.metadata.message_type.startswith("train")


def measure(dropout: float, placement: NoisePlacement, *, rounds: int, seed: int) -> Measured:
    """Run with updates of zero, so that only noise from secure sources moves the model."""
    plan = ReleasePlan(
        sampling=FullParticipation(COHORT),
        clipping_norm=NORM,
        noise_multiplier=MULTIPLIER,
        rounds=rounds,
        delta=1e-3,
        noise_placement=placement,
    )
    strategy = FederatedStrategy(DPFedAvg(local=LocalTraining(epochs=0)), plan, evaluate_every=0)
    task = Task(model=Net, data=lambda number: DATA[number % len(DATA)], device="cpu")
    grid = LosingGrid(
        DPFedAvg.client_app(task),
        COHORT,
        rates=NOTHING,
        mutations={},
        rng=np.random.default_rng(seed),
    )
    grid.dropout = dropout
    models: list[np.ndarray] = []
    result = strategy.start(
        grid,
        initial(),
        num_rounds=rounds,
        evaluate_fn=lambda number, arrays: models.append(_flat(arrays)),
    )
    steps = np.diff(np.stack(models), axis=0) * COHORT / (NORM * MULTIPLIER)
    rows = result.train_metrics_clientapp
    # The strategy tells a discarded sum from one without noise; neither moves the model.
    noise = steps[[not rows[number].get("discarded", 0) for number in range(1, rounds + 1)]]
    return Measured(
        dropout=dropout,
        placement=placement,
        released=len(noise),
        rounds=rounds,
        ratio=float(noise.std()) if len(noise) else float("nan"),
        too_little=float(stats.chi2.cdf(np.square(noise).sum(), max(1, noise.size))),
    )


def _flat(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([a.ravel() for a in records.to_arrays(arrays).values()]).astype(float)
