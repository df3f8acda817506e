"""The interface of all plans: a round need not know which kind it runs under."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import array_api_compat as api

from flower_ext.privacy.accounting import Release
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.noise import NoiseSource
from flower_ext.privacy.protections import Protection
from flower_ext.privacy.run_facts import MethodTraits, RunFacts
from flower_ext.privacy.sampling import Sampling
from flower_ext.privacy.updates import Update, total


class RoundDiscarded(RuntimeError):
    """Replies are missing, their noise with them, and the plan says to release nothing."""


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """A released average and how it came about."""

    value: dict[str, Any]
    answered: int
    topped_up_stddev: float


class PrivacyPlan(Protocol):
    """A plan: the sampling of a round, and the protection of those who take part.

    A plan is frozen. It knows of a run what `RunFacts` say, and nothing else.
    """

    @property
    def sampling(self) -> Sampling:
        """Draws the cohorts."""

    @property
    def delta(self) -> float | None:
        """δ at which ε is reported; None where nothing is promised."""

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds that the noise was chosen for, where it was."""

    @property
    def release(self) -> Release | None:
        """What one round is for accountant and ledger, where it releases one noised sum.

        Nothing but that sum may then show in the model, and cohorts have to be secret.
        """

    @property
    def client_protects(self) -> bool:
        """Whether a ClientApp has to bound or noise what it sends."""

    @property
    def bounds_models(self) -> bool:
        """Whether a client's whole model is bounded, and not its update."""

    @property
    def tells_sizes(self) -> bool:
        """Whether clients tell how many examples they have."""

    @property
    def needs_sizes(self) -> bool:
        """Whether ε depends on them."""

    def describe(self) -> str:
        """For the log."""

    def check(self, method: MethodTraits) -> None:
        """Refuse a method whose uploads the plan does not protect.

        Raises
        ------
        ValueError
            Says why not.
        """

    def check_training(self, run: RunFacts) -> None:
        """Refuse local training that the plan does not speak of.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """

    def protection(self, run: RunFacts, cohort_size: int) -> Protection | None:
        """What each client of a cohort does to its upload."""

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

    def aggregate(
        self, uploads: Sequence[Update], *, cohort_size: int, noise: NoiseSource, like: Update
    ) -> Aggregate:
        """The average of a round's uploads.

        Parameters
        ----------
        uploads : Sequence[Update]
            At most one a client.
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

    def spent(self, run: RunFacts) -> dict[str, float]:
        """ε so far, for the log and the report's figures; what is infinite is left out."""


@dataclass(frozen=True, kw_only=True)
class PlainAverage:
    """The mean of those who answer, as it is; promises nothing unless a plan adds it."""

    sampling: Sampling

    @property
    def planned_rounds(self) -> int | None:
        """Any number."""
        return None

    @property
    def release(self) -> Release | None:
        """None: the server sees single uploads."""
        return None

    @property
    def client_protects(self) -> bool:
        """No."""
        return False

    @property
    def bounds_models(self) -> bool:
        """No."""
        return False

    @property
    def tells_sizes(self) -> bool:
        """Yes."""
        return True

    @property
    def needs_sizes(self) -> bool:
        """No."""
        return False

    def check(self, method: MethodTraits) -> None:
        """Take any method."""

    def check_training(self, run: RunFacts) -> None:
        """Take any training."""

    def protection(self, run: RunFacts, cohort_size: int) -> Protection | None:
        """None."""
        return None

    def largest_upload(self, *, cohort_size: int, numbers: int, norms: float = 1.0) -> float:
        """Infinite."""
        return math.inf

    def guarantees(self, run: RunFacts) -> list[Guarantee]:
        """None."""
        return []

    def spent(self, run: RunFacts) -> dict[str, float]:
        """ε as the guarantees have it."""
        return {f"epsilon_{one.basis}": one.epsilon for one in self.guarantees(run)}

    def aggregate(
        self, uploads: Sequence[Update], *, cohort_size: int, noise: NoiseSource, like: Update
    ) -> Aggregate:
        """Mean of the uploads; ``noise`` is not used.

        Raises
        ------
        RoundDiscarded
            Nobody answered.
        """
        if not uploads:
            raise RoundDiscarded(f"none of {cohort_size} clients answered")
        value = {
            name: api.array_namespace(array).astype(array / len(uploads), like[name].dtype)
            for name, array in total(uploads, like=like).items()
        }
        return Aggregate(value=value, answered=len(uploads), topped_up_stddev=0.0)


@dataclass(frozen=True, kw_only=True)
class NonPrivatePlan(PlainAverage):
    """Plain averaging, without clipping or noise: promises nothing.

    For the comparison of a private method with itself.
    """

    @property
    def delta(self) -> float | None:
        """None: nothing is promised."""
        return None

    def describe(self) -> str:
        """For the log."""
        return f"{self.sampling.describe()} · no privacy"
