"""pFedMe: personal models as Moreau envelopes around a shared model.

Source: T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes" (NeurIPS
2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
w, w_i, θ_i           the shared model (``arrays``), the client's copy, its memory
R, |D|, η             ``local``: epochs (or steps), batch_size, learning_rate
K, η_p                ``personal_training``: steps on each mini-batch, learning_rate
λ                     ``attraction``
β                     ``server.learning_rate``
====================  =====================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flower_ext.checks import Positive
from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Method,
    Steps,
    personal_model,
)
from flower_ext.training import Job, LocalTraining, Proximal, job_batches


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """For each mini-batch, take K steps on θ_i around w_i, then move w_i to θ_i (lines 5–9).

    θ_i starts at the received model; each later mini-batch continues from the last θ_i.
    """
    if len(work.data.train) == 0:
        return LocalResult(model=work.received, memory=work.memory or work.received)
    local, attraction = work.training["local"], work.settings["attraction"]
    w = theta = work.received
    job = Job(params=w, examples=work.data.train, training=local, generator=work.generator)
    # Draw all mini-batches first, because the training of θ_i draws from the same generator.
    for batch in [*job_batches(work.task, job)]:
        near, examples = Proximal(weight=attraction, anchor=w), Examples(*batch)
        # If one mini-batch fails, the whole training fails, as it does in other methods.
        theta = yield work.train(
            "personal_training", theta, terms=[near], examples=examples, returns_params=False
        )
        pull = local.learning_rate * attraction
        w = {name: centre - pull * (centre - theta[name]) for name, centre in w.items()}
    return LocalResult(model=w, memory=theta)


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """Personal models that stay on the clients, anchored to a shared model.

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

    attraction: Positive = 15.0
    local: LocalTraining = LocalTraining(learning_rate=0.01)
    personal_training: LocalTraining = LocalTraining(steps=5, learning_rate=0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        for phase, training in self.training.items():
            training.require_plain_sgd(phase, "pFedMe's steps are plain SGD")
        if not self.personal_training.steps:
            raise InvalidValue("personal_training.steps: expected K >= 1 steps on each mini-batch")

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training: w_i, then θ_i with K steps on each mini-batch of w_i."""
        personal = replace(self.personal_training, batch_size=self.local.batch_size)
        return {"local": self.local, "personal_training": personal}
