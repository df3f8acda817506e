"""Counts of the rounds in which each unit took part, for adversaries who see the cohorts.

Cohorts never depend on data: they are drawn at random, or follow a fixed order. A guarantee may
therefore hold for the participations that took place, and need not average over all participations
that were possible.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord


@dataclass(kw_only=True, eq=False)
class Participations(JsonRecord):
    """For each unit, a weighted count of the releases to which the unit contributed.

    A sum with the whole noise σ has weight 1. A sum with less noise, σ/√w, has weight w, because it
    reveals as much as w sums with noise σ.
    """

    rounds: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """For each kind of query, the number of noised sums that answered it."""
    uploads: Counter[int] = field(default_factory=Counter)
    """For each unit, the number of training rounds with its data, even if no upload arrived."""
    newest: dict[int, int] = field(default_factory=dict)
    """Number of the last round in which each unit took part; units that never did are left out."""
    weights_in_sums: dict[int, float] = field(default_factory=dict)
    weights_in_uploads: dict[int, float] = field(default_factory=dict)

    def record(self, cohort: Sequence[int], answered: int, *, needed: int | None = None) -> None:
        """Count one round, which used the data of the units in ``cohort``.

        ``needed`` is the number of uploads that together carry all the noise of the plan, by
        default one from each unit. ``answered`` is the number of uploads in the sum. If each client
        adds a share of the noise, a single upload has 1/``needed`` of the variance that the plan
        requires, and the sum has ``answered``/``needed`` of this variance. An adversary may also
        see uploads that the server refused or that came too late, so every upload that was asked
        for counts as seen.
        """
        needed = len(cohort) if needed is None else needed
        if not 0 <= answered <= needed:
            raise InvalidValue(
                f"answered={answered!r}: expected a number from 0 to needed={needed}"
            )
        self.rounds += 1
        self.uploads.update(cohort)
        self.newest.update(dict.fromkeys(cohort, self.rounds))
        for unit in cohort:
            # An upload has 1/needed of the noise's variance, so it has the weight ``needed``.
            _add(self.weights_in_uploads, unit, needed)
            if answered > 0:  # without an answer there is no sum to see
                _add(self.weights_in_sums, unit, needed / answered)

    def record_answer(
        self, query: str, units: Iterable[int], *, in_sum: float, in_upload: float
    ) -> None:
        """Count one answer to a query by ``units``.

        ``in_sum`` is the weight of the answer's sum, and ``in_upload`` the weight of each upload.
        """
        self.answers[query] += 1
        for unit in units:
            _add(self.weights_in_sums, unit, in_sum)
            _add(self.weights_in_uploads, unit, in_upload)

    @property
    def in_sums(self) -> float:
        """Largest weight that any unit has, for an adversary who sees each released sum."""
        return max(self.weights_in_sums.values(), default=0.0)

    @property
    def in_uploads(self) -> float:
        """Largest weight that any unit has, for an adversary who sees each upload."""
        return max(self.weights_in_uploads.values(), default=0.0)

    def level(self, units: Iterable[int]) -> None:
        """Give all ``units`` the same counts: the largest counts that any unit has.

        Each unit gets the largest number of uploads, the largest weights and the latest last round.
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
