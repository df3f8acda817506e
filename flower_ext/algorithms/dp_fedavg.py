"""DP-FedAvg and its variants: clients share one whole model under client-level DP.

Source: Zhang, Guo, Gong, DP²-FedSAM, Algorithm 1 and the baselines of Tables II and III;
DP-FedAvg is due to McMahan et al. (2018), DP-FedSAM to Shi et al. (2023).

====================  =====================================================
paper                 here
====================  =====================================================
θ                     the shared model (``arrays``)
N, r                  ``plan.sampling``: ``population``, ``sampling_rate``
C, σ                  ``plan.clipping_norm``, ``plan.noise_multiplier``
τ, η                  ``local.epochs`` (or ``steps``), ``local.learning_rate``
q                     ``local.sam_radius`` (SAM; 0 is SGD)
====================  =====================================================

With a `NonPrivatePlan` the same methods are FedAvg and FedSAM without DP.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientMethod, ClientWork, LocalResult, Memory, Method, Steps
from flower_ext.privacy import Guarantee
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.dp2_fedsam_theorem import theorem2_of_run
from flower_ext.training import LocalTraining, Params


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the received model (Algorithm 1, lines 5–10)."""
    trained = yield work.train("local", work.received)
    return LocalResult(model=trained)


def local_model(work: ClientWork) -> Steps[Params]:
    """Return the received model. If ``fine_tuning`` is set, train it on the client's data first."""
    if "fine_tuning" not in work.training:
        return work.received
    tuned: Params = yield work.train("fine_tuning", work.received)
    return tuned


@dataclass(frozen=True, kw_only=True)
class DPFedAvg(Method):
    """Federated averaging with client-level DP.

    Parameters
    ----------
    local : LocalTraining
        Training of the whole model on a sampled client.
    fine_tuning : LocalTraining, optional
        Training of the received model before a client evaluates it (the -FT variants). The result
        never leaves the client, so it costs no privacy.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="dp_fedavg",
        local_update=local_update,
        local_model=local_model,
        memory=Memory.NONE,
        upload_phase="local",
    )
    any_client_app = True
    plain_name = "FedAvg"

    local: LocalTraining = LocalTraining()
    fine_tuning: LocalTraining | None = None

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The training of the whole model, without the fine-tuning."""
        return {"local": self.local}

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """The fine-tuning before evaluation, if there is any."""
        return {} if self.fine_tuning is None else {"fine_tuning": self.fine_tuning}

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return the guarantee of Theorem 2 of DP²-FedSAM, and the provable guarantees."""
        return [*theorem2_of_run(mechanism, run), *super().claims(run, mechanism)]


@dataclass(frozen=True, kw_only=True)
class DPFedSAM(DPFedAvg):
    """DP-FedAvg with sharpness-aware local training."""

    plain_name = "FedSAM"

    local: LocalTraining = LocalTraining(sam_radius=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.sam_radius == 0:
            raise InvalidValue(
                "local.sam_radius=0: expected a radius > 0; use DPFedAvg to train without SAM"
            )
