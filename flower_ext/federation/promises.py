"""What each kind of plan asks of the clients, holds their uploads to, and promises afterwards.

One class a kind of plan, so that a round need not know which kind it runs under.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from flower_ext.federation.protection import (
    perturbation_facts,
    plan_facts,
    record_level_facts,
)
from flower_ext.federation.records import Arrays, RefusedReply
from flower_ext.privacy import (
    Guarantee,
    OutputPerturbation,
    PerturbationPlan,
    Plan,
    RecordLevelPlan,
    ReleasePlan,
    privacy_loss_of,
)
from flower_ext.privacy.client_level import check_client_plan
from flower_ext.privacy.noise import largest_noised_norm
from flower_ext.privacy.updates import l2_norm

if TYPE_CHECKING:
    from flower_ext.federation.strategy import FederatedStrategy

P_co = TypeVar("P_co", bound=Plan, covariant=True)

_ROUNDING = 1.01
"""Room for rounding to the precision in which uploads travel, half precision at the worst."""


@dataclass(frozen=True)
class Promise(Generic[P_co]):
    """Of a plan without privacy: clients tell their sizes, and nothing is promised."""

    strategy: FederatedStrategy
    plan: P_co

    @property
    def client_protects(self) -> bool:
        """Whether a ClientApp has to bound or noise what it sends."""
        return False

    @property
    def needs_sizes(self) -> bool:
        """Whether ε depends on how many examples each client has."""
        return False

    def facts(self) -> dict[str, float]:
        """What a client needs to know to protect its upload in this round."""
        return {"report-size": True}

    def check_method(self) -> None:
        """Refuse a method whose uploads the plan does not protect.

        Raises
        ------
        ValueError
            Says why not.
        """

    def check_training(self) -> None:
        """Refuse local training that the plan does not speak of.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """

    def check_upload(self, partition: int, update: Arrays, received: Arrays) -> None:
        """Refuse an upload that is larger than bound and noise of an honest client explain.

        What clients noise cannot be clipped without changing the noise. See
        `ReleasePlan.largest_upload` for what this protects.

        Parameters
        ----------
        update, received : Arrays
            What the client sent, and the model that it was sent.

        Raises
        ------
        RefusedReply
            Names the norm and the largest probable one.
        """
        limit = self._largest(partition, sum(array.size for array in update.values()))
        if math.isinf(limit):
            return
        if (norm := l2_norm(self._bounded(update, received))) > limit * _ROUNDING:
            raise RefusedReply(
                f"norm {norm:.4g}: bound and noise of an honest upload stay below {limit:.4g}"
            )

    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far, of which there is one at least."""
        return []

    def spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""
        return {}

    def _largest(self, partition: int, numbers: int) -> float:
        return math.inf

    def _bounded(self, update: Arrays, received: Arrays) -> Arrays:
        """What the client bounds before it noises: its whole model, unless it is the update."""
        return {name: received[name] + step for name, step in update.items()}


class ReleasePromise(Promise[ReleasePlan]):
    """Updates are bounded and noised, by the clients or by the server."""

    def check_method(self) -> None:
        """Its units are the clients, unless the method says otherwise."""
        if self.strategy.units_are_clients:
            check_client_plan(self.plan)

    @property
    def client_protects(self) -> bool:
        """Where the plan places the noise there."""
        return self.plan.noise_placement == "client"

    def facts(self) -> dict[str, float]:
        """Bound and share of the noise of one client."""
        strategy = self.strategy
        return plan_facts(self.plan, len(strategy.cohort.asked), seeded_noise=strategy.seeded_noise)

    def guarantees(self) -> list[Guarantee]:
        """The method's published claim, and what is provable against each adversary."""
        claim = self.strategy.published_claim()
        return [*([] if claim is None else [claim]), *self.strategy.provable_guarantees(self.plan)]

    def spent(self) -> dict[str, float]:
        """ε against who sees the released models."""
        releases = {self.plan.release: self.strategy.participations.rounds}
        spent = {"epsilon_provable": privacy_loss_of(releases, delta=self.plan.delta).epsilon}
        if (claim := self.strategy.published_claim()) is not None:
            spent["epsilon_published"] = claim.epsilon
        return spent

    def _largest(self, partition: int, numbers: int) -> float:
        return self.plan.largest_upload(
            cohort_size=len(self.strategy.cohort.asked),
            numbers=numbers,
            norms=self.strategy.cohort.norms.get(partition, 1.0),
        )

    def _bounded(self, update: Arrays, received: Arrays) -> Arrays:
        return update


class PerturbationPromise(Promise[PerturbationPlan]):
    """Clients perturb their models, or the objectives that these minimise."""

    @property
    def client_protects(self) -> bool:
        """Always."""
        return True

    @property
    def needs_sizes(self) -> bool:
        """Sensitivity falls with the number of records."""
        return True

    @property
    def trained(self) -> PerturbationPlan:
        """The plan, with what the method's training makes of the local problem."""
        weight = self.strategy.proximal_weight
        tolerances = [training.tolerance for training in self.strategy.training.values()]
        exact = weight > 0 and all(tolerances)
        objective = replace(
            self.plan.objective,
            proximal_weight=weight,
            distance_to_minimiser=max(tolerances) / weight if exact else math.inf,
            rounding=self._rounding(),
            memoryless=self.strategy.client.memoryless,
        )
        return replace(self.plan, objective=objective)

    def _rounding(self) -> float:
        """What a trained model loses in the precision of the one that was sent, in clipping norms.

        Half of eps of each number; half of the smallest one above zero, where numbers are below
        what is normal.
        """
        own, sent = self.plan.perturbation, self.strategy.sent
        norm = own.clipping_norm if isinstance(own, OutputPerturbation) else math.inf
        kinds = {np.finfo(array.dtype) for array in sent.values()} or {np.finfo(np.float32)}
        numbers = sum(array.size for array in sent.values())
        relative = max(float(kind.eps) / 2 for kind in kinds)
        least = max(float(kind.smallest_subnormal) / 2 for kind in kinds)
        return max(relative, 2.0**-24) + math.sqrt(numbers) * least / norm

    def facts(self) -> dict[str, float]:
        """How a client perturbs."""
        own = perturbation_facts(self.trained, seeded_noise=self.strategy.seeded_noise)
        return {**super().facts(), **own}

    def guarantees(self) -> list[Guarantee]:
        """Published and provable, over all clients."""
        return self.trained.guarantees(
            num_examples=self.strategy.num_examples,
            participations=self.strategy.participations.uploads,
            secure_noise=not self.strategy.seeded_noise,
            not_covered=self.strategy.not_covered(),
        )

    def spent(self) -> dict[str, float]:
        """ε of the client that spent most."""
        return self.trained.spent(
            num_examples=self.strategy.num_examples,
            participations=self.strategy.participations.uploads,
        )

    def _largest(self, partition: int, numbers: int) -> float:
        own = self.plan.perturbation
        if not isinstance(own, OutputPerturbation):
            return math.inf
        return largest_noised_norm(own.clipping_norm, own.noise_stddev, numbers)


class RecordLevelPromise(Promise[RecordLevelPlan]):
    """Clients noise their models, or the local steps that lead to them."""

    @property
    def client_protects(self) -> bool:
        """Always."""
        return True

    def facts(self) -> dict[str, float]:
        """How a client clips and noises."""
        own = record_level_facts(self.plan, seeded_noise=self.strategy.seeded_noise)
        return {**super().facts(), **own}

    def check_method(self) -> None:
        """Noise in local steps protects what only these steps lead to."""
        if self.plan.steps and self.strategy.client.upload_phase is None:
            raise ValueError(
                f"plan.steps: {type(self.strategy).__name__} uploads more of a record than its "
                "gradients in local steps, so that noise in them is not enough: take a plan "
                "without steps"
            )

    def check_training(self) -> None:
        """Noised steps are those that the plan accounts for."""
        steps, size = self.plan.steps, self.plan.num_examples
        if steps is None:
            return
        phase = self.strategy.client.upload_phase
        assert phase is not None
        training = self.strategy.training[phase]
        found = {
            "learning_rate": (training.learning_rate, steps.learning_rate),
            "batch_size": (min(training.batch_size, size), steps.batch_size or size),
            "steps": (training.num_steps(size), steps.local_steps),
            "momentum": (training.momentum, 0.0),
            "sam_radius": (training.sam_radius, 0.0),
            "tolerance": (training.tolerance, 0.0),
        }
        for name, (own, planned) in found.items():
            if own != planned:
                raise ValueError(
                    f"{phase}.{name}={own!r}: expected {planned!r}, as in the plan's clipped steps"
                )

    def guarantees(self) -> list[Guarantee]:
        """Published and provable; everyone uploads in every round."""
        return self.plan.guarantees(
            rounds=self.strategy.participations.rounds,
            secure_noise=not self.strategy.seeded_noise,
            not_covered=self.strategy.not_covered(),
        )

    def spent(self) -> dict[str, float]:
        """ε after the rounds so far."""
        rounds = self.strategy.participations.rounds
        return self.plan.spent(rounds) if rounds else {}

    def _largest(self, partition: int, numbers: int) -> float:
        stddev = self.plan.noise_stddev if self.plan.steps is None else 0.0
        return largest_noised_norm(self.plan.clipping_norm, stddev, numbers)


def promise_of(strategy: FederatedStrategy) -> Promise[Plan]:
    """That of the strategy's plan."""
    plan = strategy.plan
    if isinstance(plan, ReleasePlan):
        return ReleasePromise(strategy, plan)
    if isinstance(plan, PerturbationPlan):
        return PerturbationPromise(strategy, plan)
    if isinstance(plan, RecordLevelPlan):
        return RecordLevelPromise(strategy, plan)
    return Promise(strategy, plan)
