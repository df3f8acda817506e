"""Participations of each unit in rounds: the view of an adversary who sees the cohorts.

Cohorts are drawn from public or secret randomness, never from data. A guarantee may therefore be
stated for the participations that took place, rather than for their distribution.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flower_ext.errors import InvalidValue


class Participations:
    """Weighted counts, by unit, of the releases to which the unit contributed.

    The unit of a weight is one fully noised sum. A Gaussian of noise σ/√w has weight w, because it
    reveals as much as w Gaussians of noise σ.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.answers: Counter[str] = Counter()
        """Number of noised sums that answered each kind of query beside the rounds."""
        self.uploads: Counter[int] = Counter()
        """Number of uploads that each unit was asked for."""
        self.newest: dict[int, int] = {}
        """Number of the last round in which each unit took part; units that never did are left
        out."""
        self._in_sums: defaultdict[int, float] = defaultdict(float)
        self._in_uploads: defaultdict[int, float] = defaultdict(float)

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
            # Each share has 1/asked of the noise's variance, so seeing one counts asked times.
            self._in_uploads[unit] += asked
            if answered > 0:  # without an answer there is no sum to see
                self._in_sums[unit] += asked / answered

    def record_answer(
        self, query: str, units: Iterable[int], *, in_sum: float, in_upload: float
    ) -> None:
        """Add an answer to a query about ``units``, with its weights in sums and in uploads."""
        self.answers[query] += 1
        for unit in units:
            self._in_sums[unit] += in_sum
            self._in_uploads[unit] += in_upload

    @property
    def in_sums(self) -> float:
        """Largest weight of any unit for an adversary who sees the sum of each round's clients."""
        return max(self._in_sums.values(), default=0.0)

    @property
    def in_uploads(self) -> float:
        """Largest weight of any unit for an adversary who sees each upload."""
        return max(self._in_uploads.values(), default=0.0)

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
        self._in_sums = defaultdict(float, dict.fromkeys(units, in_sums))
        self._in_uploads = defaultdict(float, dict.fromkeys(units, in_uploads))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, which `from_dict` reads."""
        return {
            "rounds": self.rounds,
            "answers": dict(self.answers),
            "newest": [*self.newest.items()],
            "units": [
                [unit, self.uploads[unit], self._in_sums.get(unit), self._in_uploads[unit]]
                for unit in sorted({*self.uploads, *self._in_uploads})
            ],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Participations:
        """Return the participations that `to_dict` wrote."""
        participations = cls()
        participations.rounds = fields["rounds"]
        participations.answers = Counter(fields["answers"])
        participations.newest = dict(fields["newest"])
        for unit, count, in_sums, in_uploads in fields["units"]:
            participations.uploads[unit] = count
            participations._in_uploads[unit] = in_uploads
            if in_sums is not None:
                participations._in_sums[unit] = in_sums
        return participations
