"""DP²-FedSAM: a shared extractor trained by SAM, a personal head that never leaves the client.

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

`Centaur` is the same with SGD in place of SAM; with a `NonPrivatePlan`, `DP2FedSAM` is the
paper's P-FedSAM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
    Steps,
)
from flower_ext.privacy import Guarantee, PrivacyPlan
from flower_ext.privacy.run_facts import RunFacts
from flower_ext.privacy.theorems.dp2_fedsam import theorem2_of_plan
from flower_ext.training import LocalTraining, Params


def own_head(work: ClientWork) -> Params:
    """h of this client: what it kept, or the initial one before it was ever sampled.

    Raises
    ------
    ValueError
        The server shares other parameters than it did before; what is personal stays here. Or it
        shares all of them.
    """
    names = set(work.task.shapes) - set(work.received)
    if work.memory is None:
        if not names:
            raise tellable(
                InvalidValue(
                    f"the server shares all of {sorted(work.received)}: personal= names none of "
                    "them"
                )
            )
        return {n: p for n, p in work.initial_params().items() if n in names}
    if set(work.memory) != names:
        raise tellable(
            InvalidValue(
                f"the server shares all but {sorted(names)}; personal so far: {sorted(work.memory)}"
            )
        )
    return work.memory


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Lines 5–17 of Algorithm 2: the head first, with φ frozen; then φ by SAM, with h frozen."""
    shared, head = work.received, own_head(work)
    model = yield work.train("head", {**shared, **head}, lambda name: name in head)
    model = yield work.train("extractor", model, lambda name: name in shared)
    moved = {name: model[name] for name in shared}
    return LocalResult(model=moved, memory={name: model[name] for name in head})


def local_model(work: ClientWork) -> Steps[Params]:
    """(φ, h): the received extractor under the client's own head, adapted to it where asked."""
    head = own_head(work)
    model = {**work.received, **head}
    if "head" not in work.training:
        return model
    adapted: Params = yield work.train("head", model, lambda name: name in head)
    return adapted


class DP2FedSAM(FederatedStrategy):
    """Partial sharing with sharpness-aware training under client-level DP.

    In the mean all clients count alike; with ``NonPrivatePlan(weighting="examples")`` each by its
    number of examples.

    Parameters
    ----------
    plan : PrivacyPlan
    personal : Sequence[str]
        Names of the modules that are the head h, where ``*`` stands for any part; by the paper's
        choice the last linear layer.
    head : LocalTraining
        SGD on h. The paper's rate is 0.1 or 0.005: its text names the two rates the other way
        round than its symbols do.
    extractor : LocalTraining
        SAM on φ, radius q.
    adapt_before_evaluation : bool
        Train the head on the current φ, as the client would at the start of its next round,
        before it evaluates. Local, forgotten afterwards, at no cost in privacy. The paper
        evaluates the head as the client last left it: ``False``.
    **options
        Those of `FederatedStrategy`.
    """

    client = ClientMethod(name="dp2_fedsam", local_update=local_update, local_model=local_model)

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        personal: Sequence[str] = ("head",),
        head: LocalTraining | None = None,
        extractor: LocalTraining | None = None,
        adapt_before_evaluation: bool = False,
        **options: Any,
    ) -> None:
        if not personal:
            raise InvalidValue("personal=(): name the module that is the head, e.g. ('head',)")
        super().__init__(plan=plan, personal=personal, **options)
        self.head = head or LocalTraining()
        self.extractor = extractor or LocalTraining(sam_radius=0.1)
        self.adapt_before_evaluation = adapt_before_evaluation

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Theorem 2, by which the paper calibrates all its methods, and what is provable."""
        return [*theorem2_of_plan(self.plan, run), *super().claims(run)]

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The head first, then the extractor."""
        return {"head": self.head, "extractor": self.extractor}

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """The head alone, where asked for."""
        return {"head": self.head} if self.adapt_before_evaluation else {}


class Centaur(DP2FedSAM):
    """CENTAUR at client level: DP²-FedSAM with plain SGD on the extractor."""

    def __init__(self, *, extractor: LocalTraining | None = None, **options: Any) -> None:
        extractor = replace(extractor or LocalTraining(), sam_radius=0.0)
        super().__init__(extractor=extractor, **options)
