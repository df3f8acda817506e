"""Local models that each client perturbs: record-level privacy from a server that sees them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.perturbation import Perturbation
from flower_ext.privacy.release_plan import PlainAverage
from flower_ext.privacy.theorems.local_objective import LocalObjective
from flower_ext.privacy.theorems.upcycled import epsilons, perturbation_guarantees


@dataclass(frozen=True, kw_only=True)
class PerturbationPlan(PlainAverage):
    """Who takes part and how each local model is perturbed before it is averaged as it is.

    Privacy unit: one record of one client. The server sees every upload and who sent it, so the
    sampling of clients amplifies nothing.

    Parameters
    ----------
    perturbation : Perturbation
        Output or objective perturbation.
    objective : LocalObjective
        What the theorems need to know of the local problem.
    delta : float
        In (0, 1).
    """

    perturbation: Perturbation
    objective: LocalObjective = field(default_factory=LocalObjective)
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta!r}: expected a number in (0, 1)")

    def describe(self) -> str:
        """For the log."""
        return f"{self.sampling.describe()} · {self.perturbation}"

    def guarantees(
        self,
        *,
        num_examples: Mapping[int, int],
        participations: Mapping[int, int],
        secure_noise: bool,
        not_covered: Sequence[str] = (),
    ) -> list[Guarantee]:
        """Published and provable ε, each the largest of any client.

        Parameters
        ----------
        num_examples : Mapping[int, int]
            |D_i| by client.
        participations : Mapping[int, int]
            Uploads by client.
        """
        return perturbation_guarantees(
            self.perturbation,
            self.objective,
            num_examples=num_examples,
            participations=participations,
            delta=self.delta,
            secure_noise=secure_noise,
            not_covered=not_covered,
        )

    def spent(
        self, *, num_examples: Mapping[int, int], participations: Mapping[int, int]
    ) -> dict[str, float]:
        """Mean ε over clients (the paper's ε̄) and largest ε, published and provable."""
        by_client = epsilons(
            self.perturbation,
            self.objective,
            num_examples=num_examples,
            participations=participations,
            delta=self.delta,
        )
        published, provable = (
            np.asarray(list(by_client.values()), dtype=np.float64).reshape(-1, 2).T
        )
        spent = {
            "epsilon_published": published.max(initial=0.0),
            "epsilon_published_mean": published.mean() if published.size else 0.0,
            "epsilon_provable": provable.max(initial=0.0),
            "epsilon_provable_mean": provable.mean() if provable.size else 0.0,
        }
        return {name: float(value) for name, value in spent.items() if np.isfinite(value)}
