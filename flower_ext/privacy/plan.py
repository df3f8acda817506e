"""The base of all plans: a round need not know which kind it runs under."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import array_api_compat as api

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting import Release
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.noise import NoiseSource
from flower_ext.privacy.protections import Protection
from flower_ext.privacy.run_facts import MethodTraits, RunFacts
from flower_ext.privacy.sampling import Sampling
from flower_ext.privacy.updates import Summed, Update, as_float64, total


class RoundDiscarded(RuntimeError):
    """Replies are missing, their noise with them, and the plan says to release nothing."""


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """A released average and how it came about."""

    value: dict[str, Any]
    answered: int
    topped_up_stddev: float


class PrivacyPlan(ABC):
    """A plan: the sampling of a round, and the protection of those who take part.

    A plan is frozen. It knows of a run what `RunFacts` say, and nothing else. What it does not
    define is that of a plan that takes any method and any training, and protects nobody.

    Attributes
    ----------
    sampling : Sampling
        Draws the cohorts.
    delta : float, optional
        δ at which ε is reported; None where nothing is promised.
    """

    sampling: Sampling
    delta: float | None

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds that the noise was chosen for, where it was."""
        return None

    @property
    def release(self) -> Release | None:
        """What one round is for accountant and ledger, where it releases one noised sum.

        Nothing but that sum may then show in the model, and cohorts have to be secret.
        """
        return None

    @property
    def client_protects(self) -> bool:
        """Whether a ClientApp has to bound or noise what it sends."""
        return False

    @property
    def bounds_models(self) -> bool:
        """Whether a client's whole model is bounded, and not its update."""
        return False

    @property
    def tells_sizes(self) -> bool:
        """Whether clients tell how many examples they have."""
        return False

    @property
    def needs_sizes(self) -> bool:
        """Whether ε depends on them."""
        return False

    @property
    def weighs_examples(self) -> bool:
        """Whether an upload counts in the mean as often as its client has examples, which it tells.

        Never under a plan that protects: how many they are is data.
        """
        return False

    @abstractmethod
    def describe(self) -> str:
        """For the log."""

    def check(self, method: MethodTraits) -> None:  # noqa: B027 - by default any
        """Refuse a method whose uploads the plan does not protect.

        Raises
        ------
        ValueError
            Says why not.
        """

    def check_training(self, run: RunFacts) -> None:  # noqa: B027 - by default any
        """Refuse local training that the plan does not speak of.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """

    def protection(self, run: RunFacts, cohort_size: int) -> Protection | None:
        """What each client of a cohort does to its upload."""
        return None

    def largest_upload(self, *, cohort_size: int, numbers: int, norms: float = 1.0) -> float:
        """L2 norm above which no honest upload is, but with probability `IMPROBABLE`.

        Parameters
        ----------
        cohort_size : int
            How many were asked.
        numbers : int
            Of the upload.
        norms : float
            How many clipping norms an upload may have before noise: more where it is a sum.
        """
        return math.inf

    def part(self, uploads: Iterable[Update | Summed], *, like: Update) -> Summed:
        """Return the sum of some of a round's uploads, which `aggregate` takes in their place.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            An upload is not finite, or not like ``like``.
        """
        value, count = total(uploads, like=like)
        return Summed(value=value, count=count)

    @abstractmethod
    def aggregate(
        self,
        uploads: Iterable[Update | Summed],
        *,
        cohort_size: int,
        noise: NoiseSource,
        like: Update,
    ) -> Aggregate:
        """Return the average of a round's uploads.

        Parameters
        ----------
        uploads : Iterable[Update | Summed]
            At most one a client, or sums that `part` made of some; each is added as it comes, and
            not kept.
        cohort_size : int
            How many were asked.
        like : Update
            Names, shapes and dtypes of the result.

        Raises
        ------
        RoundDiscarded
            Too few answered.
        """

    def guarantees(self, run: RunFacts) -> list[Guarantee]:
        """What protects people after a run's rounds so far."""
        return []

    def spent(self, run: RunFacts) -> dict[str, float]:
        """ε so far, for the log and the report's figures; what is infinite is left out."""
        return {f"epsilon_{one.basis}": one.epsilon for one in self.guarantees(run)}


@dataclass(frozen=True, kw_only=True)
class PlainAverage(PrivacyPlan):
    """The mean of those who answer, as it is; promises nothing unless a plan adds it."""

    tells_sizes = True

    sampling: Sampling

    def aggregate(
        self,
        uploads: Iterable[Update | Summed],
        *,
        cohort_size: int,
        noise: NoiseSource,
        like: Update,
    ) -> Aggregate:
        """Mean of the uploads; ``noise`` is not used.

        Raises
        ------
        RoundDiscarded
            Nobody answered.
        """
        summed = self.part(uploads, like=like)
        if not summed.count:
            raise RoundDiscarded(f"none of {cohort_size} clients answered")
        mean = divided(summed.value, summed.count, like)
        return Aggregate(value=mean, answered=summed.count, topped_up_stddev=0.0)


def divided(summed: Update, by: float, like: Update) -> dict[str, Any]:
    """Return an average in the precision of ``like``, from a sum."""
    return {
        name: api.array_namespace(array).astype(array / by, like[name].dtype)
        for name, array in summed.items()
    }


@dataclass(frozen=True, kw_only=True)
class NonPrivatePlan(PlainAverage):
    """Plain averaging, without clipping or noise: promises nothing.

    For the comparison of a private method with itself.

    Parameters
    ----------
    sampling : Sampling
    weighting : {"clients", "examples"}
        In the mean all clients count alike, as under every plan that protects, or each by the
        number of its training examples, as in FedAvg.
    """

    weighting: Literal["clients", "examples"] = "clients"

    delta = None

    def __post_init__(self) -> None:
        if self.weighting not in ("clients", "examples"):
            raise InvalidValue(f"weighting={self.weighting!r}: expected 'clients' or 'examples'")

    @property
    def weighs_examples(self) -> bool:
        """As ``weighting`` says."""
        return self.weighting == "examples"

    def check(self, method: MethodTraits) -> None:
        """Refuse weights where the server does not take the mean.

        Raises
        ------
        ValueError
            The method makes something else of the single updates.
        """
        if self.weighs_examples and method.needs_each_update:
            raise InvalidValue(
                f"weighting='examples': expected 'clients', as {method.name} weighs single "
                "updates by a rule of its own"
            )

    def describe(self) -> str:
        """For the log."""
        by = ", weighted by examples" if self.weighs_examples else ""
        return f"{self.sampling.describe()} · no privacy{by}"


_SIZE = "number of examples"
"""Name of what is summed beside the uploads of a weighted mean; no parameter has a name like it."""


def times_examples(upload: Update, size: float) -> dict[str, Any]:
    """Return an upload times its client's number of examples, and that number, to be summed."""
    first = next(iter(upload.values()))
    namespace, device = api.array_namespace(first), api.device(first)
    summed = {name: as_float64(array) * size for name, array in upload.items()}
    return {**summed, _SIZE: namespace.asarray(size, dtype=namespace.float64, device=device)}


def weighted_mean(aggregate: Callable[[Update], Aggregate], like: Update) -> Aggregate:
    """Return the mean of uploads weighted by examples, in the precision of ``like``.

    Parameters
    ----------
    aggregate : Callable[[Update], Aggregate]
        Takes names and shapes, and returns the plain mean of what `times_examples` makes.
    """
    mean = aggregate(times_examples(like, 1.0))
    size = float(mean.value[_SIZE])
    return replace(mean, value=divided({name: mean.value[name] for name in like}, size, like))
