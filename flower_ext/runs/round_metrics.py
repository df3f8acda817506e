"""Metrics of rounds and clients: scores, the clients that reported them, and a round in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flower_ext.privacy import epsilon_text
from flower_ext.privacy.guarantee import is_large

_CLIENTS, _MEAN, _ERROR = "scored_clients", "_mean", "_mean_error"
"""Name and endings of a secure evaluation's numbers in ``metrics.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class NoisedScores:
    """Mean scores over all clients that a secure evaluation released, with noise.

    ``round`` is the round after which clients were evaluated, and ``clients`` the number of clients
    with scores, with noise. ``errors`` holds the standard errors of ``means`` due to noise.
    """

    round: int
    clients: float
    means: Mapping[str, float]
    errors: Mapping[str, float]


def noised_scores(rows: Sequence[Mapping[str, float]]) -> NoisedScores | None:
    """Return the last noised scores in a run's rows of metrics; None if there are none."""
    for row in reversed(rows):
        if _CLIENTS in row:
            names = [key.removesuffix(_ERROR) for key in row if key.endswith(_ERROR)]
            return NoisedScores(
                round=int(row["round"]),
                clients=row[_CLIENTS],
                means={name: row[name + _MEAN] for name in names},
                errors={name: row[name + _ERROR] for name in names},
            )
    return None


def reported_by_most(by_client: Iterable[Mapping[str, float]]) -> set[str]:
    """Return the metrics that more than half of the clients report; rarer names are ignored."""
    everyone = list(by_client)
    reported = Counter(name for metrics in everyone for name in metrics)
    return {name for name, count in reported.items() if 2 * count > len(everyone)}


def reported_by_few(by_client: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return all other metrics with the number of clients that report each, largest first.

    A client leaves out a score that failed or that is not finite.
    """
    everyone = list(by_client)
    usual = reported_by_most(everyone)
    reported = Counter(name for metrics in everyone for name in sorted(metrics))
    return {name: count for name, count in reported.most_common() if name not in usual}


def lower_is_better(metric: str) -> bool:
    """Return True for a metric that is a loss."""
    return metric.endswith("loss")


def describe_round(row: Mapping[str, float]) -> list[str]:
    """Return phrases on what a round achieved and cost, from its metrics."""
    phrases = []
    if "accuracy_mean" in row:
        beside = f"worst tenth {row.get('accuracy_worst_decile', 0):.3f}"
        if (error := row.get("accuracy_mean_error")) is not None:  # of a noised sum
            beside = f"± {error:.2g} by noise"
        phrases.append(f"accuracy {row['accuracy_mean']:.3f} ({beside})")
    for basis in ("provable", "published"):
        if (epsilon := row.get(f"epsilon_{basis}")) is not None:
            phrases.append(f"ε {epsilon_text(epsilon)} {basis}")
    if (delta := row.get("delta", 0)) and is_large(delta, row.get("privacy_units")):
        phrases.append(f"δ {delta:.3g} is large")
    if not row.get("messages"):
        phrases.append("no client was asked to train")
    if "answered" in row:
        phrases.append(f"{row['answered']:.0f} of {row['cohort']:.0f} answered")
    if row.get("topped_up_stddev"):
        phrases.append("the server topped up the noise")
    if row.get("discarded"):
        phrases.append("round discarded")
    if refused := row.get("refused", 0):
        phrases.append(f"{refused:.0f} refused")
    return phrases
