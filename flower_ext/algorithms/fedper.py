"""FedPer: shared base layers and personal layers, which train together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers"
(2019), Algorithms 1 and 2.

====================  =====================================================
paper                 here
====================  =====================================================
W_B                   base layers: the shared model (``arrays``)
W_P_j                 personal layers: the client's memory
e, b, η_j             ``local.epochs`` (or ``steps``), ``.batch_size``, ``.learning_rate``
γ_j                   ``weighting="examples"`` of a `NonPrivatePlan`; otherwise 1/N
====================  =====================================================

The paper draws a client's first personal layers at random; here all clients begin with the personal
layers of the run's initial model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Method,
    Steps,
    personal_part,
)
from flower_ext.training import LocalTraining, Params


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train base and personal layers together; upload the base (Algorithm 1)."""
    shared, personal = work.received, personal_part(work)
    model = yield work.train("local", {**shared, **personal})
    memory = {name: model[name] for name in personal}
    return LocalResult(model={name: model[name] for name in shared}, memory=memory)


def local_model(work: ClientWork) -> Params:
    """Return the received base layers with the client's own personal layers."""
    return {**work.received, **personal_part(work)}


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """A shared base and personal layers, trained jointly by local SGD.

    A `ReleasePlan` protects whole clients; a `RecordLevelPlan` with noise on uploads protects
    records. Both bound the client's update of the base layers, and add noise. A `RecordLevelPlan`
    with noise in local steps is refused, because the personal layers of earlier rounds, which
    depend on records, also change the upload.

    Parameters
    ----------
    personal : Sequence[str]
        Names of the modules that are personal; ``*`` matches any part of a name. They never leave
        the client, nor do their running statistics.
    local : LocalTraining
        Training of the whole model on a client.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(name="fedper", local_update=local_update, local_model=local_model)

    personal: Sequence[str] = ("head",)
    local: LocalTraining = LocalTraining()
