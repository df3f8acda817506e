"""DP²-FedSAM: a shared extractor trained by SAM, and a personal head that stays on the client.

Source: Zhang, Guo, Gong, "DP²-FedSAM: Enhancing Differentially Private Federated Learning
Through Personalized Sharpness-Aware Minimization", Algorithm 2.

====================  =====================================================
paper                 here
====================  =====================================================
φ, h                  shared extractor (``arrays``), personal head (client memory)
N, r                  ``plan.sampling``: ``population``, ``sampling_rate``
C, σ                  ``plan.clipping_norm``, ``plan.noise_multiplier``
τ_h, η_h              ``head.epochs`` (or ``steps``), ``head.learning_rate``
τ_φ, η_φ, q           ``extractor.epochs``, ``.learning_rate``, ``.sam_radius``
====================  =====================================================

`Centaur` is the same method with SGD in place of SAM. With a `NonPrivatePlan`, `DP2FedSAM` is the
paper's P-FedSAM, and `Centaur` is FedRep (Collins, Hassani, Mokhtari, Shakkottai, "Exploiting
Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Method,
    Steps,
    personal_part,
)
from flower_ext.privacy import Guarantee
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.dp2_fedsam_theorem import theorem2_of_run
from flower_ext.training import LocalTraining, Params


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the head with φ frozen, then φ by SAM with h frozen (Algorithm 2, lines 5–17)."""
    shared, head = work.received, personal_part(work)
    model = yield work.train("head", {**shared, **head}, lambda name: name in head)
    # The extractor trains with the head that was trained just now, not with the earlier head.
    model = yield work.train("extractor", model, lambda name: name in shared)
    moved = {name: model[name] for name in shared}
    return LocalResult(model=moved, memory={name: model[name] for name in head})


def local_model(work: ClientWork) -> Steps[Params]:
    """Return (φ, h): the received extractor with the client's own head.

    With ``adapt_before_evaluation``, the client first trains its head on this extractor.
    """
    head = personal_part(work)
    model = {**work.received, **head}
    if "head" not in work.training:
        return model
    adapted: Params = yield work.train("head", model, lambda name: name in head)
    return adapted


@dataclass(frozen=True, kw_only=True)
class DP2FedSAM(Method):
    """Partial sharing with sharpness-aware training under client-level DP.

    Parameters
    ----------
    personal : Sequence[str]
        Names of the modules that form the head h; ``*`` matches any part of a name. The paper
        takes the last linear layer.
    head : LocalTraining
        SGD on h. The paper gives the rates 0.1 and 0.005, but its text and its symbols assign them
        to head and extractor in opposite ways.
    extractor : LocalTraining
        SAM on φ with radius q.
    adapt_before_evaluation : bool
        If True, a client trains its head on the current φ before it evaluates, as it would at the
        start of its next round. The result stays on the client and is discarded, so it costs no
        privacy. The paper evaluates the head as the client last trained it: ``False``.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(name="dp2_fedsam", local_update=local_update, local_model=local_model)

    personal: Sequence[str] = ("head",)
    head: LocalTraining = LocalTraining()
    extractor: LocalTraining = LocalTraining(sam_radius=0.1)
    adapt_before_evaluation: bool = False

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """The head's training before evaluation, if ``adapt_before_evaluation`` is set."""
        return {"head": self.head} if self.adapt_before_evaluation else {}

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return the guarantee of Theorem 2 of DP²-FedSAM, and the provable guarantees."""
        return [*theorem2_of_run(mechanism, run), *super().claims(run, mechanism)]


@dataclass(frozen=True, kw_only=True)
class Centaur(DP2FedSAM):
    """CENTAUR at client level: DP²-FedSAM with plain SGD on the extractor."""

    extractor: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        if radius := self.extractor.sam_radius:
            raise InvalidValue(
                f"extractor.sam_radius={radius!r}: expected 0, because {self.name} trains by plain "
                "SGD; use DP2FedSAM to train by SAM"
            )


@dataclass(frozen=True, kw_only=True)
class FedRep(Centaur):
    """Personal heads on a shared representation. Plain SGD trains all parts, as in `Centaur`.

    Only the defaults differ from `Centaur`: a client trains its head for ten epochs and the
    representation for one. Both classes accept the plans that `FedPer` accepts.
    """

    head: LocalTraining = LocalTraining(epochs=10)
    extractor: LocalTraining = LocalTraining(epochs=1)
