"""Who took part in which round: what an adversary who sees the cohorts can use.

Cohorts are drawn from public or secret randomness, never from data, so a guarantee may be stated
for the schedule that really happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flower_ext.errors import InvalidValue


class Participations:
    """Counts, for each unit, the releases it went into and how well each was noised.

    Weights are in units of one fully noised sum: a Gaussian of noise σ/√w counts w times as much
    as one of noise σ (their precisions add up).
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.uploads: Counter[int] = Counter()
        """How often each unit was asked for an upload."""
        self._in_sums: defaultdict[int, float] = defaultdict(float)
        self._in_uploads: defaultdict[int, float] = defaultdict(float)

    def record(self, cohort: Sequence[int], answered: int, *, asked: int | None = None) -> None:
        """Add a round.

        With noise from the clients, a sum in which ``answered`` of the ``asked`` shares arrived
        carries only that fraction of the noise, and a single upload 1/asked of it. Uploads that
        were refused or came too late were seen all the same.

        Parameters
        ----------
        cohort : Sequence[int]
            Units whose data went into the round.
        answered, asked : int
            Uploads that arrived, and those asked for: by default one a unit.
        """
        asked = len(cohort) if asked is None else asked
        if not 0 <= answered <= asked:
            raise InvalidValue(
                f"answered={answered!r}: expected 0 … {asked}, the uploads asked for"
            )
        self.rounds += 1
        self.uploads.update(cohort)
        for unit in cohort:
            self._in_uploads[unit] += asked
            if answered > 0:
                self._in_sums[unit] += asked / answered

    @property
    def in_sums(self) -> float:
        """Largest weight of any unit for one who sees each round's clients' sum."""
        return max(self._in_sums.values(), default=0.0)

    @property
    def in_uploads(self) -> float:
        """Largest weight of any unit for one who sees each upload."""
        return max(self._in_uploads.values(), default=0.0)

    def level(self, units: Iterable[int]) -> None:
        """Count for each of ``units`` what counts for the one that took part most.

        For when it is no longer known which of them is which.
        """
        units = list(units)
        most = max(self.uploads.values(), default=0)
        in_sums, in_uploads = self.in_sums, self.in_uploads
        self.uploads = Counter(dict.fromkeys(units, most))
        self._in_sums = defaultdict(float, dict.fromkeys(units, in_sums))
        self._in_uploads = defaultdict(float, dict.fromkeys(units, in_uploads))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for `from_dict`."""
        return {
            "rounds": self.rounds,
            "units": [
                [unit, count, self._in_sums.get(unit), self._in_uploads[unit]]
                for unit, count in self.uploads.items()
            ],
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Participations:
        """Undo `to_dict`."""
        found = cls()
        found.rounds = facts["rounds"]
        for unit, count, in_sums, in_uploads in facts["units"]:
            found.uploads[unit] = count
            found._in_uploads[unit] = in_uploads
            if in_sums is not None:
                found._in_sums[unit] = in_sums
        return found

    @classmethod
    def worst_case(cls, rounds: int, cohort_size: int) -> Participations:
        """Before a run: one unit in every round, in cohorts of ``cohort_size`` that all answer."""
        schedule = cls()
        schedule.rounds = rounds
        schedule._in_sums[0] = float(rounds)
        schedule._in_uploads[0] = float(rounds * cohort_size)
        return schedule
