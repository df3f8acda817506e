"""FedALA: each client learns, for every parameter, how much of the shared model to start from.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning" (AAAI 2023), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
Θ, Θ_i                the shared model (``arrays``), the local model: the client's memory
W_i                   aggregation weights in [0, 1]: the client's memory
p                     ``adaptive``: modules with weights W; all others start from the shared model
s                     ``sample_fraction``
η                     ``weight_learning_rate``
====================  =====================================================

A round starts from Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i. The client trains W_i by the gradient
∇_Θ̂ F ⊙ (Θ − Θ_i) on a new sample of its records, and clamps W_i to [0, 1]. A client's first round
trains no W_i. Its second round makes ``first_passes`` passes over the sample, and every later round
one pass. (The paper first makes passes until the loss no longer changes.) Under a `RecordLevelPlan`
the client uploads a clipped and noised version of Θ_i; the exact Θ_i and W_i stay on the client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flower_ext.checks import Count, Fraction, Positive
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    LocalResult,
    Method,
    Steps,
    last_trained,
)
from flower_ext.privacy import PrivacyPlan
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    gradient,
    job_batches,
    local_problem,
    matches,
    tagged,
    untagged,
)
from flower_ext.training.params import require_modules

MODEL, WEIGHTS = "model", "weights"
ADAPTIVE = "adaptive."


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train W_i, mix the client's last model with the shared one by W_i, and train the mixture.

    A client that has no model from an earlier round trains the shared model instead.
    """
    start, memory = work.received, work.memory or {}
    weights = untagged(memory, WEIGHTS)
    if local := untagged(memory, MODEL):
        phase = "weights" if weights else "first_weights"
        # Settings are numbers, so the name of a module travels in the name of a setting.
        modules = [n.removeprefix(ADAPTIVE) for n in work.settings if n.startswith(ADAPTIVE)]
        # W begins with ones, at which the mixture equals the shared model.
        ones = {name: torch.ones_like(p) for name, p in local.items() if matches(name, modules)}
        # Each round draws a new sample of the client's records.
        size = max(1, round(work.settings["sample_fraction"] * len(work.data.train)))
        rows = torch.randperm(len(work.data.train), generator=work.generator)[:size]
        sample = work.data.train.subset(rows.numpy())
        solve = partial(train_weights, work, weights or ones)
        weights = yield work.train(phase, local, examples=sample, solve=solve, returns_params=False)
        start = {**work.received, **mixed(local, work.received, weights)}
    trained = yield work.train("local", start)
    memory = {**tagged(MODEL, trained), **tagged(WEIGHTS, weights)}
    return LocalResult(model=trained, memory=memory)


def mixed(local: Mapping[str, Tensor], shared: Mapping[str, Tensor], weights: Params) -> Params:
    """Return Θ_i + (Θ − Θ_i) ⊙ W_i for the parameters that have weights W_i, and no others."""
    return {n: local[n] + (shared[n] - local[n]) * w for n, w in weights.items()}


def train_weights(work: ClientWork, start: Params, job: Job) -> Params:
    """Train the weights W from ``start``, for the local model in ``job.params``; return W.

    Parameters without weights keep the values of the received model.
    """
    model = {**work.received, **{name: job.params[name] for name in start}}
    problem = local_problem(work.task, model, trained=lambda name: name in start)
    local, shared, weights = (
        {name: params[name].to(problem.device) for name in problem.start}
        for params in (job.params, work.received, start)
    )
    for x, y in job_batches(work.task, job):
        slope = gradient(problem.loss_at, mixed(local, shared, weights), x, y)
        for name, g in slope.items():
            step = job.training.learning_rate * g * (shared[name] - local[name])
            weights[name] = (weights[name] - step).clamp(0.0, 1.0)
    return {name: w.cpu() for name, w in weights.items()}


@dataclass(frozen=True, kw_only=True)
class FedALA(Method):
    """Adaptive local aggregation: each client mixes the shared model into its own.

    Parameters
    ----------
    adaptive : Sequence[str]
        Modules with learned weights W: the paper's p highest layers. A name that matches no
        module of the model ends the run before its first round.
    weight_learning_rate : float
        η: learning rate of W.
    sample_fraction : float
        s: fraction of the records on which W trains in a round, in (0, 1].
    first_passes : int
        Passes over the sample in a client's first training of W.
    local : LocalTraining
        Training of the local model. W trains with the same batch size.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="fedala", local_update=local_update, local_model=partial(last_trained, tag=MODEL)
    )

    adaptive: Sequence[str] = ("head",)
    weight_learning_rate: Positive = 1.0
    sample_fraction: Fraction = 0.8
    first_passes: Count = 10
    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.adaptive:
            raise InvalidValue(
                "adaptive=(): expected the names of modules with learned weights, e.g. ('head',)"
            )
        object.__setattr__(self, "adaptive", tuple(self.adaptive))

    def check_model(self, model: Arrays) -> None:
        """Refuse a name in ``adaptive`` that matches no module of the model."""
        require_modules("adaptive", self.adaptive, model)

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training: the local model, W, and a client's first training of W."""
        weights = LocalTraining(
            epochs=1, batch_size=self.local.batch_size, learning_rate=self.weight_learning_rate
        )
        first = replace(weights, epochs=self.first_passes)
        return {"local": self.local, "weights": weights, "first_weights": first}

    def settings(self, plan: PrivacyPlan) -> Mapping[str, float]:
        """Return the settings for clients; ``adaptive.NAME`` marks a module with weights W."""
        modules = {ADAPTIVE + module: 1.0 for module in self.adaptive}
        return {**super().settings(plan), **modules}
