"""Base class of plans, which a user writes, and the plan of a run without privacy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.round_mechanism import (
    Aggregate,
    RoundDiscarded,
    RoundMechanism,
    divided,
)
from flower_ext.privacy.mechanisms.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.mechanisms.updates import RunningSum


class PrivacyPlan(ABC):
    """A user's decisions about the privacy of a run, from which its mechanism is made.

    A plan is frozen. It knows about a run only what its `RunSummary` says.

    Attributes
    ----------
    sampling : Sampling
        Draws the cohorts.
    delta : float, optional
        δ at which ε is reported; None where the plan guarantees nothing.
    rounds : int, optional
        Number of rounds for which the noise was chosen; None if the plan does not fix a number.
    """

    sampling: Sampling
    delta: float | None
    rounds: int | None = None

    def num_units(self, run: RunSummary) -> int | None:
        """Return the number of privacy units, or None if it is not known.

        Reports warn about a δ that is large for this number.
        """
        return None

    @abstractmethod
    def describe(self) -> str:
        """Describe the plan in words, for the log."""

    @abstractmethod
    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return the mechanism for the rounds of ``method``. A run calls this once.

        Raises
        ------
        ValueError
            The plan does not protect the method's uploads; the message gives the reason.
        """


@dataclass(frozen=True, kw_only=True)
class PlainAverage(PrivacyPlan, RoundMechanism):
    """A plan that takes the mean of the replies; it guarantees nothing unless a subclass does.

    The method determines none of its fields, so the plan is its own mechanism.
    """

    tells_sizes = True

    sampling: Sampling

    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return this plan, which is its own mechanism."""
        return self

    def aggregate(self, summed: RunningSum, *, cohort_size: int, noise: NoiseSource) -> Aggregate:
        """Return the mean of the uploads; ``noise`` is not used.

        Raises
        ------
        RoundDiscarded
            No client answered.
        """
        if not summed.count:
            raise RoundDiscarded(f"none of {cohort_size} clients answered, so there is no mean")
        mean = divided(summed.value, summed.count, summed.like)
        return Aggregate(value=mean, answered=summed.count, topped_up_stddev=0.0)


@dataclass(frozen=True, kw_only=True)
class NonPrivatePlan(PlainAverage):
    """Plain averaging without clipping or noise. It guarantees nothing.

    Use it to compare a private method with the same method without privacy.

    Parameters
    ----------
    sampling : Sampling
    weighting : {"clients", "examples"}
        "clients" gives all clients the same weight in the mean, as every plan that protects does.
        "examples" weighs each client by its number of training examples, as FedAvg does.
    """

    weighting: Literal["clients", "examples"] = "clients"

    delta = None

    def __post_init__(self) -> None:
        if self.weighting not in ("clients", "examples"):
            raise InvalidValue(f"weighting={self.weighting!r}: expected 'clients' or 'examples'")

    @property
    def weighs_examples(self) -> bool:
        """True if ``weighting`` is "examples"."""
        return self.weighting == "examples"

    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return this plan; refuse weights if the server does not take the mean of the updates.

        Raises
        ------
        ValueError
            The method combines the single updates in another way.
        """
        if self.weighs_examples and method.weighs_updates:
            raise InvalidValue(
                f"weighting='examples': expected 'clients', because the server's step of "
                f"{method.name} weights clients by a different rule"
            )
        return self

    def describe(self) -> str:
        """Describe the plan in words, for the log."""
        by = ", weighted by examples" if self.weighs_examples else ""
        return f"{self.sampling.describe()} · no privacy{by}"
