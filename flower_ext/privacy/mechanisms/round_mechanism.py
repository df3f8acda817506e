"""Base class of mechanisms, which a run executes round by round; plans make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.secure_sum import SecureSum
from flower_ext.privacy.mechanisms.updates import NamedArrays, RunningSum
from flower_ext.privacy.run_summary import RunSummary


class RoundDiscarded(RuntimeError):
    """The round releases nothing, because too few clients answered or a member spoiled the sum."""


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """A released average, and the number of replies in it.

    ``topped_up_stddev`` is the stddev of the noise that the server added to the sum in place of
    clients that did not answer.
    """

    value: dict[str, Any]
    answered: int
    topped_up_stddev: float


class RoundMechanism(ABC):
    """A round's mechanism: it protects uploads, adds them up, and computes the run's guarantees.

    A mechanism is frozen. The defaults of this class accept any training, and protect nobody.
    ``sampling`` and ``delta`` are as in `PrivacyPlan`.
    """

    tells_sizes: ClassVar[bool] = False
    """True if clients tell the server their numbers of examples and the method's metrics."""
    needs_sizes: ClassVar[bool] = False
    """True if ε depends on the clients' numbers of examples."""

    sampling: Sampling
    delta: float | None

    @property
    def release(self) -> Release | None:
        """One round's noised sum, as accountant and ledger count it; None if there is no such sum.

        A mechanism that returns a release must ensure that the model depends on clients' data only
        through these sums, and that cohorts stay secret.
        """
        return None

    def release_in(self, number: int) -> Release | None:
        """Return the release of training round ``number``; by default, it is always `release`."""
        return self.release

    @property
    def mean_noise_stddev(self) -> float:
        """Stddev of the noise in each coordinate of the released mean; 0 if no sum gets noise."""
        return 0.0

    @property
    def client_protects(self) -> bool:
        """True if a ClientApp must bound or noise what it sends."""
        return False

    @property
    def secure_sum(self) -> SecureSum | None:
        """Settings of the secure sums that hide single uploads; None without secure sums."""
        return None

    @property
    def weighs_examples(self) -> bool:
        """True if the mean weights uploads by clients' private numbers of examples."""
        return False

    def check_training(self, run: RunSummary) -> None:  # noqa: B027 - by default any
        """Refuse local training that the plan does not cover; by default, accept any."""

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection that each client of a cohort applies to its upload."""
        return None

    def upload_like(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return arrays with the names, shapes and types of an upload; by default, ``model``."""
        return model

    def begin_sum(self, like: NamedArrays) -> RunningSum:
        """Return an empty sum, to which each upload of a round is added when it arrives."""
        return RunningSum(like)

    @abstractmethod
    def aggregate(self, summed: RunningSum, *, cohort_size: int, noise: NoiseSource) -> Aggregate:
        """Return the average of a round's uploads; raise `RoundDiscarded` to release nothing.

        ``summed`` is a sum from `begin_sum`, with at most one upload of each client that was asked.
        ``cohort_size`` is the number of these clients.
        """

    def after(self, mean: Aggregate) -> tuple[Aggregate, RoundMechanism]:
        """Return the mean of the updates, and the mechanism of the next round.

        ``mean`` is the result of `aggregate`. Under some plans, clients send other arrays together
        with their updates, as for adaptive clipping. A subclass removes these arrays from the mean.
        By default, ``mean`` and the mechanism stay as they are.
        """
        return mean, self

    @property
    def state(self) -> Mapping[str, float]:
        """The numbers that change between rounds, for metrics and checkpoints; empty by default."""
        return {}

    def restored(self, state: Mapping[str, float]) -> RoundMechanism:
        """Return the mechanism with the `state` of a checkpoint."""
        return self

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the guarantees that hold after the rounds so far."""
        return []

    def spent(self, run: RunSummary) -> dict[str, float]:
        """Return the published and the provable ε of the rounds so far, for log and figures.

        If several guarantees have the same basis, the largest ε counts.
        """
        largest: dict[str, float] = {}
        for claim in self.guarantees(run) if run.participations.rounds else ():
            name = f"epsilon_{claim.basis}"
            largest[name] = max(largest.get(name, 0.0), claim.epsilon)
        return largest
