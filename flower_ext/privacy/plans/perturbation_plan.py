"""The plan of perturbed local models: record-level privacy against a server that sees uploads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flower_ext.checks import ProperFraction
from flower_ext.privacy.base_plan import PlainAverage
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.protections import OutputPerturbation, Perturbation, Protection
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.upcycled_theorem import (
    LocalObjective,
    epsilons_by_client,
    perturbation_guarantees,
)


@dataclass(frozen=True, kw_only=True)
class PerturbationPlan(PlainAverage):
    """A plan in which each client perturbs its local model; the server takes the plain mean.

    Privacy unit: one record of one client. The server sees every upload and its sender, so the
    sampling of clients amplifies nothing.

    Parameters
    ----------
    perturbation : Perturbation
        Output or objective perturbation.
    objective : LocalObjective
        Known properties of the local training problem, which the theorems need.
    delta : float
        In (0, 1).
    """

    client_protects = True
    needs_sizes = True  # sensitivity falls as the number of records grows

    perturbation: Perturbation
    objective: LocalObjective = field(default_factory=LocalObjective)
    delta: ProperFraction

    def describe(self) -> str:
        """Describe the plan in words, for the log."""
        return f"{self.sampling.describe()} · {self.perturbation}"

    def objective_in(self, run: RunSummary) -> LocalObjective:
        """Return `objective`, completed by the properties that follow from the run's training."""
        weight = run.proximal_weight
        tolerances = [training.tolerance for training in run.training.values()]
        exact = weight > 0 and all(tolerances)
        return replace(
            self.objective,
            proximal_weight=weight,
            distance_to_minimiser=max(tolerances, default=math.inf) / weight if exact else math.inf,
            rounding=self._rounding(run.sent),
            memoryless=run.method.updates_ignore_memory,
        )

    def _rounding(self, sent: Mapping[str, Any]) -> float:
        """Return the distance by which rounding may move a trained model, in clipping norms.

        ``sent`` is the model that the server sent; the trained model has the same types. Rounding
        moves a normal number by at most its magnitude times half the machine epsilon, and a
        subnormal number by at most half of the smallest positive number.
        """
        perturbation = self.perturbation
        norm = (
            perturbation.clipping_norm if isinstance(perturbation, OutputPerturbation) else math.inf
        )
        kinds = {np.finfo(array.dtype) for array in sent.values()} or {np.finfo(np.float32)}
        numbers = sum(array.size for array in sent.values())
        relative = max(float(kind.eps) / 2 for kind in kinds)
        least = max(float(kind.smallest_subnormal) / 2 for kind in kinds)
        return max(relative, 2.0**-24) + math.sqrt(numbers) * least / norm

    def num_units(self, run: RunSummary) -> int:
        """Return the number of records that clients have reported."""
        return sum(run.num_examples.values())

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the perturbation that each client applies."""
        if isinstance(self.perturbation, OutputPerturbation):
            return self.perturbation
        least = self.objective_in(run).least_examples()
        return replace(self.perturbation, least_examples=least)

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the published and the provable guarantee; each ε is the largest of all clients."""
        return perturbation_guarantees(
            self.perturbation, self.objective_in(run), run, delta=self.delta
        )

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return the largest ε of all clients, and the mean ε over clients (ε̄ in the paper).

        The result has two numbers for the published ε, and two for the provable ε. It leaves out
        infinite numbers.
        """
        objective = self.objective_in(run)
        by_client = epsilons_by_client(self.perturbation, objective, run, delta=self.delta)
        columns = np.asarray(list(by_client.values()), dtype=np.float64).reshape(-1, 2).T
        spent = {}
        for basis, values in zip(("published", "provable"), columns, strict=True):
            spent[f"epsilon_{basis}"] = values.max(initial=0.0)
            spent[f"epsilon_{basis}_mean"] = values.mean() if values.size else 0.0
        return {name: float(value) for name, value in spent.items() if np.isfinite(value)}
