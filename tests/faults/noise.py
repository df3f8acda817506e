"""The noise that is really in what is released, while clients drop out: measured, not assumed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message
from scipy import stats

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import records
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.privacy.noised_sum import DropoutPolicy, NoisePlacement
from flower_ext.training import LocalTraining, Task
from tests.faults.grid import NOTHING, FaultyGrid
from tests.faults.worlds import DATA, Net, initial

COHORT = 10
NORM, MULTIPLIER = 0.5, 2.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Noise of the sums that were released, over what the plan accounts for."""

    dropout: float
    policy: str
    released: int
    rounds: int
    ratio: float
    """Standard deviation measured over that accounted for; NaN where nothing was released."""
    too_little: float
    """How probable so little noise is where the plan's is there."""

    @property
    def enough(self) -> bool:
        """Whether the noise is not significantly less than accounted for, 1 in a million."""
        return self.released == 0 or self.too_little > 1e-6


class LosingGrid(FaultyGrid):
    """Loses each training reply with a probability."""

    dropout = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As `InProcessGrid`, but for the replies that are lost."""
        replies = super().send_and_receive(messages, timeout=timeout)
        return [r for r in replies if not _of_training(r) or self.rng.random() >= self.dropout]


def _of_training(reply: Message) -> bool:
    return reply.metadata.message_type.startswith("train")


def measure(
    dropout: float, policy: DropoutPolicy, placement: NoisePlacement, *, rounds: int, seed: int
) -> Measured:
    """Run with updates of zero, so that all that moves the model is noise from secure sources."""
    plan = ReleasePlan(
        sampling=FullParticipation(COHORT),
        clipping_norm=NORM,
        noise_multiplier=MULTIPLIER,
        rounds=rounds,
        delta=1e-3,
        noise_placement=placement,
        dropout_policy=policy,
    )
    strategy = DPFedAvg(plan=plan, local=LocalTraining(epochs=0), evaluate_every=0)
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
    # As the strategy says: a sum that was released without noise moves nothing, as one discarded.
    noise = steps[[not rows[number].get("discarded", 0) for number in range(1, rounds + 1)]]
    return Measured(
        dropout=dropout,
        policy=policy if placement == "client" else "server noises",
        released=len(noise),
        rounds=rounds,
        ratio=float(noise.std()) if len(noise) else float("nan"),
        too_little=float(stats.chi2.cdf(np.square(noise).sum(), max(1, noise.size))),
    )


def _flat(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([a.ravel() for a in records.to_arrays(arrays).values()]).astype(float)
