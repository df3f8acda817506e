"""Who took part in which round: what an adversary who sees the cohorts can use.

Cohorts are drawn from public or secret randomness, never from data, so a guarantee may be stated
for the schedule that really happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


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
            raise ValueError(f"answered={answered!r}: expected 0 … {asked}, the uploads asked for")
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

    @classmethod
    def worst_case(cls, rounds: int, cohort_size: int) -> Participations:
        """Before a run: one unit in every round, in cohorts of ``cohort_size`` that all answer."""
        schedule = cls()
        schedule.rounds = rounds
        schedule._in_sums[0] = float(rounds)
        schedule._in_uploads[0] = float(rounds * cohort_size)
        return schedule
