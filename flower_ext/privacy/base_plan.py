"""Base classes of plans, and the plan of a run without privacy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from flower_ext.checks import Checked
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded, RoundMechanism
from flower_ext.privacy.mechanisms.updates import RunningSum, divided
from flower_ext.privacy.run_summary import MethodTraits, RunSummary


class PrivacyPlan(ABC):
    """The decisions about the privacy of a run, made before it begins.

    `mechanism` returns the object that carries out these decisions in each round. A plan of noised
    sums makes a separate object, because the computation depends on the method and may change from
    round to round. Every other plan returns itself (see `PlainAverage`). A plan is frozen. It
    learns about a run only from the `RunSummary`.

    Attributes
    ----------
    sampling : Sampling
        Draws the cohorts.
    delta : float, optional
        δ at which ε is reported; None if the plan guarantees nothing.
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

        If the plan cannot protect the method's uploads, this call raises a `ValueError` with the
        reason.
        """


@dataclass(frozen=True, kw_only=True)
class PlainAverage(Checked, PrivacyPlan, RoundMechanism):
    """A plan that takes the plain mean of the replies. A subclass may add a guarantee.

    A plain mean is computed in the same way for every method. The plan therefore computes the mean
    itself, and needs no separate mechanism.
    """

    tells_sizes = True

    sampling: Sampling

    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return this plan, which is its own mechanism."""
        return self

    def aggregate(self, summed: RunningSum, *, cohort_size: int, noise: NoiseSource) -> Aggregate:
        """Return the mean of the uploads; ``noise`` is not used."""
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
        "clients" gives all clients the same weight in the mean, as all private plans do.
        "examples" weighs each client by its number of training examples, as FedAvg does.
    """

    weighting: Literal["clients", "examples"] = "clients"

    delta = None

    @property
    def weighs_examples(self) -> bool:
        """True if ``weighting`` is "examples"."""
        return self.weighting == "examples"

    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return this plan; refuse "examples" if the method has a weighting rule of its own."""
        if self.weighs_examples and method.weighs_updates:
            raise InvalidValue(
                f"weighting='examples': expected 'clients', because the server of "
                f"{method.name} gives clients weights by a rule of the method's own"
            )
        return self

    def describe(self) -> str:
        """Describe the plan in words, for the log."""
        by = ", weighted by examples" if self.weighs_examples else ""
        return f"{self.sampling.describe()} · no privacy{by}"
