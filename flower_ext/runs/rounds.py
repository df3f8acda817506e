"""The metrics of a run's rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CLIENTS, _MEAN, _ERROR = "scored_clients", "_mean", "_mean_error"
"""Name and endings of a secure evaluation's numbers in ``metrics.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class NoisedScores:
    """Scores that a secure evaluation released: means over all clients, with noise.

    ``round`` is the round after which clients were evaluated. ``clients`` is the number of clients
    with scores, with noise. ``errors`` has the standard errors of ``means`` that the noise causes.
    """

    round: int
    clients: float
    means: Mapping[str, float]
    errors: Mapping[str, float]


class Rounds(list[dict[str, float]]):
    """The metrics of a run's rounds, one row per round and in order."""

    @property
    def last(self) -> float:
        """Number of the last round; 0 without rounds."""
        return max((row["round"] for row in self), default=0)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (rounds, values) of one metric, for the rounds that measured it."""
        rows = [row for row in self if name in row]
        return [row["round"] for row in rows], [row[name] for row in rows]

    def total(self, *names: str) -> float:
        """Return the sum of metrics over all rounds."""
        return sum(row.get(name, 0) for row in self for name in names)

    def noised_scores(self) -> NoisedScores | None:
        """Return the last noised scores; None if no secure evaluation released any."""
        for row in reversed(self):
            if _CLIENTS in row:
                names = [key.removesuffix(_ERROR) for key in row if key.endswith(_ERROR)]
                return NoisedScores(
                    round=int(row["round"]),
                    clients=row[_CLIENTS],
                    means={name: row[name + _MEAN] for name in names},
                    errors={name: row[name + _ERROR] for name in names},
                )
        return None
