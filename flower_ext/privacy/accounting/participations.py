"""Participations of each unit in rounds: the view of an adversary who sees the cohorts.

Cohorts are drawn from public or secret randomness, never from data. A guarantee may therefore be
stated for the participations that took place, rather than for their distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord


@dataclass(kw_only=True, eq=False)
class Participations(JsonRecord):
    """Weighted counts, by unit, of the releases to which the unit contributed.

    A weight of 1 is one fully noised sum. A Gaussian of noise σ/√w has weight w, because it reveals
    as much as w Gaussians of noise σ.
    """

    rounds: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """For each kind of query, the number of noised sums that answered it."""
    uploads: Counter[int] = field(default_factory=Counter)
    """Number of uploads that each unit was asked for."""
    newest: dict[int, int] = field(default_factory=dict)
    """Number of the last round in which each unit took part; units that never did are left out."""
    weights_in_sums: dict[int, float] = field(default_factory=dict)
    weights_in_uploads: dict[int, float] = field(default_factory=dict)

    def record(self, cohort: Sequence[int], answered: int, *, asked: int | None = None) -> None:
        """Add a round.

        If the clients add the noise, a sum in which ``answered`` of the ``asked`` shares arrived
        carries only that fraction of the noise's variance, and a single upload carries 1/asked. An
        adversary may also see uploads that the server refused or that came too late, so every
        upload that was asked for counts as seen.

        Parameters
        ----------
        cohort : Sequence[int]
            Units whose data went into the round.
        answered, asked : int
            Number of uploads that arrived, and of uploads that were asked for. By default one
            upload per unit was asked for.
        """
        asked = len(cohort) if asked is None else asked
        if not 0 <= answered <= asked:
            raise InvalidValue(
                f"answered={answered!r}: expected 0 … {asked}, the uploads asked for"
            )
        self.rounds += 1
        self.uploads.update(cohort)
        self.newest.update(dict.fromkeys(cohort, self.rounds))
        for unit in cohort:
            # A share has 1/asked of the noise's variance, so seeing it counts ``asked`` times.
            _add(self.weights_in_uploads, unit, asked)
            if answered > 0:  # without an answer there is no sum to see
                _add(self.weights_in_sums, unit, asked / answered)

    def record_answer(
        self, query: str, units: Iterable[int], *, in_sum: float, in_upload: float
    ) -> None:
        """Add an answer to a query about ``units``, with its weights in sums and in uploads."""
        self.answers[query] += 1
        for unit in units:
            _add(self.weights_in_sums, unit, in_sum)
            _add(self.weights_in_uploads, unit, in_upload)

    @property
    def in_sums(self) -> float:
        """Largest weight of any unit for an adversary who sees the sum of each round's clients."""
        return max(self.weights_in_sums.values(), default=0.0)

    @property
    def in_uploads(self) -> float:
        """Largest weight of any unit for an adversary who sees each upload."""
        return max(self.weights_in_uploads.values(), default=0.0)

    def level(self, units: Iterable[int]) -> None:
        """Set the count, weights and last round of ``units`` to the largest of any unit.

        Call this if the server no longer knows which counts belong to which unit.
        """
        units = list(units)
        most = max(self.uploads.values(), default=0)
        in_sums, in_uploads = self.in_sums, self.in_uploads
        self.uploads = Counter(dict.fromkeys(units, most))
        if self.newest:
            self.newest = dict.fromkeys(units, max(self.newest.values()))
        self.weights_in_sums = dict.fromkeys(units, in_sums)
        self.weights_in_uploads = dict.fromkeys(units, in_uploads)


def _add(weights: dict[int, float], unit: int, weight: float) -> None:
    weights[unit] = weights.get(unit, 0.0) + weight
