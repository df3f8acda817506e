"""APFL: each client mixes a personal model with its copy of the shared one.

Source: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning" (2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
w, w_i                the shared model (``arrays``), the client's copy that it trains and uploads
v_i                   personal model: the client's memory
α_i                   ``personal_weight``; an adaptive α_i is in the client's memory
v̄_i                   the mixture α_i v_i + (1 − α_i) w_i, which the client evaluates
τ, η                  ``local.epochs`` (or ``steps``), ``local.learning_rate``
====================  =====================================================

At each mini-batch, w_i moves by −η ∇f_i(w_i), and v_i moves by −η α_i ∇f_i(v̄_i). If α_i adapts, it
moves at the first mini-batch of a round, by −η_α ⟨v_i − w_i, ∇f_i(v̄_i)⟩, and is clamped to [0, 1].

The client trains w_i twice. The first training does not use v_i or α_i, so its result, the upload,
equals that of `DPFedAvg`. The second training repeats the same mini-batches, and trains v_i and α_i
along with w_i. Its results do not leave the client, so they need no noise. The library PFLlib
differs from the paper: there v_i moves by the gradient at v_i, and the mixture replaces v_i after
each round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flower_ext.checks import FractionOrZero, NotNegative
from flower_ext.federation import ClientMethod, ClientWork, LocalResult, Memory, Method, Steps
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    clone,
    gradient,
    job_batches,
    local_problem,
)
from flower_ext.training.params import to_device

WEIGHT = "mixture/α"
"""Name of α_i in a client's memory, which also holds the parameters of v_i."""


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train w_i, which the client uploads, then v_i and α_i on the same mini-batches."""
    weight = torch.tensor(work.settings["personal_weight"], dtype=torch.float64)
    start = work.memory or {**work.received, WEIGHT: weight}
    # Repeat the draws of the mini-batches, and add no noise: v_i and α_i stay on the client.
    generator = torch.Generator().set_state(work.generator.get_state())
    private = replace(work, generator=generator, step_noise={})
    trained = yield work.train("local", work.received)
    personal = yield private.train("local", start, solve=partial(descend_mixture, work))
    return LocalResult(model=trained, memory=personal)


def descend_mixture(work: ClientWork, job: Job) -> Params:
    """Train v_i and α_i on a job's mini-batches, together with a copy of w_i; return v_i and α_i.

    v_i and α_i start at their values in ``job.params``, and the copy of w_i at the received model.
    """
    rate, alpha = job.training.learning_rate, float(job.params[WEIGHT])
    problem = local_problem(work.task, job.params)
    v, w = clone(problem.start), clone(to_device(work.received, problem.device))
    for number, (x, y) in enumerate(job_batches(work.task, job)):
        at_mixture = gradient(problem.loss_at, mixture(v, w, alpha), x, y)
        at_w = gradient(problem.loss_at, {name: w[name] for name in v}, x, y)
        along = sum(float(((v[n] - w[n]) * slope).sum()) for n, slope in at_mixture.items())
        for name, slope in at_mixture.items():
            v[name].sub_(slope, alpha=rate * alpha)
            w[name].sub_(at_w[name], alpha=rate)
        if number == 0:
            step = work.settings["weight_learning_rate"] * along
            alpha = min(1.0, max(0.0, alpha - step))
    weight = torch.tensor(alpha, dtype=torch.float64)  # float64 stores α without rounding
    return problem.whole({**v, WEIGHT: weight}, like=job.params)


def mixture(v: Mapping[str, Tensor], w: Mapping[str, Tensor], alpha: float) -> Params:
    """Return α v + (1 − α) w for the parameters that are in v."""
    return {name: alpha * p + (1 - alpha) * w[name] for name, p in v.items()}


def local_model(work: ClientWork) -> Params:
    """Return the mixture of v_i and the received model; for a new client, the received model."""
    if work.memory is None:
        return work.received
    personal = {name: work.memory[name] for name in work.received}
    return mixture(personal, work.received, float(work.memory[WEIGHT]))


@dataclass(frozen=True, kw_only=True)
class APFL(Method):
    """A shared model, and a mixture of it with a personal model on each client.

    Every plan that fits `DPFedAvg` fits here, because the upload does not depend on the client's
    memory. A `ReleasePlan` protects clients. A `RecordLevelPlan` protects records, by noise on the
    upload or in the local steps. The personal model v_i and its weight α_i never leave the client.

    Parameters
    ----------
    personal_weight : float
        Each client's initial α, in [0, 1]. At 0 the client uses the shared model; at 1 it uses a
        model that is trained on its own data only.
    weight_learning_rate : float
        η_α >= 0: learning rate of the adaptive α_i; the paper takes η. At 0, α does not change.
    local : LocalTraining
        Training of w_i and v_i, by plain SGD.
    **options
        Fields of `Method`, except ``personal``.
    """

    client = ClientMethod(
        name="apfl",
        local_update=local_update,
        local_model=local_model,
        memory=Memory.BESIDE_UPDATES,  # the personal model and its weight
        upload_phase="local",
    )

    personal_weight: FractionOrZero = 0.5
    weight_learning_rate: NotNegative = 0.0
    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local.require_plain_sgd("local", "APFL's steps are plain SGD")
