"""FedALA: each client learns, weight by weight, how much of the shared model it starts from.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning" (AAAI 2023), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
Θ, Θ_i                the shared model (``arrays``), the local model: the client's memory
W_i                   aggregation weights in [0, 1]: the client's memory
p                     ``adaptive``: modules with weights W; all others start from the shared model
s                     ``sample_share``
η                     ``weight_learning_rate``
====================  =====================================================

Start: Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i. W_i learns by ∇_Θ̂ F ⊙ (Θ − Θ_i), cut to [0, 1], on a new sample
of the records: one pass in every round, and ``first_passes`` of them when it begins, where the
paper goes on until the loss is steady. Under a `RecordLevelPlan` what a client uploads is Θ_i
clipped and noised; Θ_i itself and W_i never leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from flower_ext.algorithms.one_phase import one_by_one
from flower_ext.checks import require_at_least_one, require_positive, require_rate
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
    Steps,
    Training,
)
from flower_ext.privacy import PrivacyPlan
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    Task,
    batches,
    gradient,
    local_problem,
    matches,
    part,
    tagged,
)
from flower_ext.training.params import require_modules

MODEL, WEIGHTS = "model", "weights"
SHARE, FIRST, ADAPTIVE = "sample-share", "first-passes", "adaptive."


@dataclass(frozen=True, kw_only=True)
class Aggregation(Job):
    """A job that trains weights between ``params``, the local model, and ``shared``."""

    shared: Params
    weights: Params


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Learn W_i where there is a local model, start from its mix, train."""
    kept = work.memory or {}
    weights = part(kept, WEIGHTS)
    start = work.received
    if local := part(kept, MODEL):
        weights = yield aggregation(work, local, weights)
        start = {**work.received, **mixed(local, work.received, weights)}
    trained = yield work.train("local", start)
    memory = {**tagged(MODEL, trained), **tagged(WEIGHTS, weights)}
    return LocalResult(model=trained, memory=memory)


def aggregation(work: ClientWork, local: Params, weights: Params) -> Training:
    """Train W_i on a new sample: ones, and more passes, when it begins."""
    modules = [name.removeprefix(ADAPTIVE) for name in work.settings if name.startswith(ADAPTIVE)]
    names = {name for name in local if matches(name, modules)}
    size = max(1, round(work.settings[SHARE] * len(work.data.train)))
    rows = torch.randperm(len(work.data.train), generator=work.generator)[:size]
    training = work.training["weights"]
    if not weights:
        weights = {name: torch.ones_like(local[name]) for name in local if name in names}
        training = replace(training, epochs=int(work.settings[FIRST]))
    job = Aggregation(
        params=local,
        examples=work.data.train.subset(rows.numpy()),
        training=training,
        generator=work.generator,
        shared=work.received,
        weights=weights,
    )
    return Training(
        task=work.task, job=job, trained=lambda name: name in names, solve=train_weights
    )


def mixed(local: Mapping[str, Tensor], shared: Mapping[str, Tensor], weights: Params) -> Params:
    """Θ_i + (Θ − Θ_i) ⊙ W_i, over the names that have weights."""
    return {n: local[n] + (shared[n] - local[n]) * w for n, w in weights.items()}


@one_by_one
def train_weights(task: Task, job: Aggregation, trained: Callable[[str], bool]) -> Params:
    """W of a job; what has no weights comes from the shared model."""
    frozen = {name: p for name, p in job.shared.items() if not trained(name)}
    problem = local_problem(task, {**job.params, **frozen}, trained=trained)
    device = problem.device
    local = {name: job.params[name].to(device) for name in problem.start}
    shared = {name: job.shared[name].to(device) for name in problem.start}
    weights = {name: job.weights[name].to(device) for name in problem.start}
    for x, y in batches(job.examples.to(device), job.training, job.generator):
        slope = gradient(problem.loss_at, mixed(local, shared, weights), x, y)
        for name, g in slope.items():
            step = job.training.learning_rate * g * (shared[name] - local[name])
            weights[name] = (weights[name] - step).clamp(0.0, 1.0)
    return {name: w.cpu() for name, w in weights.items()}


def local_model(work: ClientWork) -> Params:
    """The local model as it was last trained; the shared one before that."""
    return part(work.memory or {}, MODEL) or work.received


class FedALA(FederatedStrategy):
    """Adaptive local aggregation of the shared model into the client's own.

    In the mean all clients count alike; with ``NonPrivatePlan(weighting="examples")`` each by its
    number of examples.

    Parameters
    ----------
    plan : PrivacyPlan
    adaptive : Sequence[str]
        Modules whose weights W are learned: the paper's p highest layers. A name that is none of
        the model's ends the run before its first round.
    weight_learning_rate : float
        η.
    sample_share : float
        s: share of the records on which W learns in a round, in (0, 1].
    first_passes : int
        Passes over them when W begins.
    local : LocalTraining
        Of the local model; its batches are also those of W.
    **options
        Those of `FederatedStrategy`.
    """

    client = ClientMethod(name="fedala", local_update=local_update, local_model=local_model)

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        adaptive: Sequence[str] = ("head",),
        weight_learning_rate: float = 1.0,
        sample_share: float = 0.8,
        first_passes: int = 10,
        local: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        if not adaptive:
            raise InvalidValue("adaptive=(): name the modules whose weights are learned")
        require_positive("weight_learning_rate", weight_learning_rate)
        require_rate("sample_share", sample_share)
        require_at_least_one("first_passes", first_passes)
        super().__init__(plan=plan, **options)
        self.adaptive = tuple(adaptive)
        self.weight_learning_rate = weight_learning_rate
        self.sample_share, self.first_passes = sample_share, first_passes
        self.local = local or LocalTraining()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As every method, once ``adaptive`` is known to fit.

        Raises
        ------
        ValueError
            ``adaptive`` names none of the model's modules.
        """
        require_modules("adaptive", self.adaptive, self.shared(arrays))
        return super().configure_train(server_round, arrays, config, grid)

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The local model, and the weights that it starts from."""
        weights = LocalTraining(
            epochs=1,
            batch_size=self.local.batch_size,
            learning_rate=self.weight_learning_rate,
        )
        return {"local": self.local, "weights": weights}

    @property
    def settings(self) -> Mapping[str, float]:
        """s, the first passes, and the modules with weights."""
        modules = {ADAPTIVE + module: 1.0 for module in self.adaptive}
        return {SHARE: self.sample_share, FIRST: self.first_passes, **modules}
