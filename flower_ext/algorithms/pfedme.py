"""pFedMe: personal models as Moreau envelopes around a shared model.

Source: T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes" (NeurIPS
2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
w, θ_i                the shared model (``arrays``), the client's memory
R, |D|, η             ``local``: epochs (or steps), batch_size, learning_rate
K, η_p                ``personal_training``: steps on each mini-batch, learning_rate
λ                     ``attraction``
β                     ``server.learning_rate``
====================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flower_ext.checks import require_positive
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Method,
    Steps,
    Training,
    one_by_one,
    personal_model,
)
from flower_ext.training import Job, LocalTraining, Params, Proximal, Task, clone
from flower_ext.training.job import job_batches
from flower_ext.training.problem import gradient, local_problem
from flower_ext.training.seeding import seeded_by


@dataclass(kw_only=True)
class Envelope(Job):
    """A job that minimises its loss's Moreau envelope, by K steps on θ_i for each mini-batch."""

    personal: LocalTraining
    attraction: float


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """For each mini-batch, take K steps on θ_i around w_i, then move w_i to θ_i (lines 5–9)."""
    if len(work.data.train) == 0:
        return LocalResult(model=work.received, memory=work.memory or work.received)
    job = Envelope(
        params=work.received,
        examples=work.data.train,
        training=work.training["local"],
        generator=work.generator,
        terms=work.terms,
        personal=work.training["personal_training"],
        attraction=work.settings["attraction"],
    )
    moved, personal = yield Training(
        task=work.task, job=job, trained=lambda name: True, solve=minimise_envelope
    )
    return LocalResult(model=moved, memory=personal)


@one_by_one
def minimise_envelope(
    task: Task, job: Envelope, trained: Callable[[str], bool]
) -> tuple[Params, Params]:
    """Return (w_i, θ_i) of one job.

    θ_i starts at the received model, and each mini-batch continues from the θ_i before it.
    """
    pull = job.training.learning_rate * job.attraction
    with seeded_by(job.generator, task.torch_device()):
        problem = local_problem(task, job.params, trained=trained, terms=job.objective)
        w, theta = clone(problem.start), clone(problem.start)
        near = Proximal(weight=job.attraction, anchor=w)

        def envelope(point: Params, x: Tree, y: Tree) -> Tensor:
            return problem.loss_at(point, x, y) + near(point)

        for x, y in job_batches(task, job):
            for _ in range(job.personal.steps or 1):
                for name, step in gradient(envelope, theta, x, y).items():
                    theta[name].sub_(step, alpha=job.personal.learning_rate)
            for name, centre in w.items():
                centre.sub_(centre - theta[name], alpha=pull)
    return problem.whole(w, like=job.params), problem.whole(theta, like=job.params)


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """Personal models that stay on the clients, anchored to a shared model.

    All clients count alike in the mean. With ``NonPrivatePlan(weighting="examples")``, each client
    counts by its number of examples.

    Parameters
    ----------
    attraction : float
        λ > 0: strength of the pull of personal models towards the shared one.
    local : LocalTraining
        Training of the shared model's local copy, without momentum.
    personal_training : LocalTraining
        Training of the personal model on each mini-batch: ``steps`` K and ``learning_rate`` η_p.
    **options
        Fields of `Method`; the learning rate of ``server`` is β.
    """

    client = ClientMethod(name="pfedme", local_update=local_update, local_model=personal_model)

    attraction: float = 15.0
    local: LocalTraining = LocalTraining(learning_rate=0.01)
    personal_training: LocalTraining = LocalTraining(steps=5, learning_rate=0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("attraction", self.attraction)
        for phase, training in self.training.items():
            training.require_plain_sgd(phase, "pFedMe's steps are plain SGD")
        if not self.personal_training.steps:
            raise InvalidValue("personal_training.steps: expected K >= 1 steps on each mini-batch")
