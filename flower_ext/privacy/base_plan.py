"""Base class of plans, which a user writes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import MethodTraits, RunSummary


class PrivacyPlan(ABC):
    """A user's decisions about the privacy of a run.

    `mechanism` returns the object that carries them out in each round. A plan of noised sums makes
    a separate object, because the computation depends on the method and may change from round to
    round. Every other plan returns itself (see `PlainAverage`). A plan is frozen. It learns about a
    run only from the `RunSummary`.

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

        If the plan does not protect the method's uploads, a `ValueError` gives the reason.
        """
