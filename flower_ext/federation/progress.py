"""The costs and scores of each round: one row of numbers and one line in the log."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from logging import getLogger
from time import monotonic

import numpy as np

from flower_ext.metrics import summarize
from flower_ext.metrics.reported import is_loss, reported_by_most
from flower_ext.privacy import epsilon_text
from flower_ext.privacy.guarantee import is_large
from flower_ext.runs import RunWriter

log = getLogger("flwr")

MOST_SHOWN = 3
"""Largest number of refused replies per phase that the log quotes; the run directory has all."""

_PREFIXES = {"train": "", "evaluate": "evaluation_", "query": "query_"}
_EVALUATED = "evaluation_messages"


class Progress:
    """Collects the numbers of a round, and writes them to the log and the run directory.

    Training, evaluation and queries are counted separately (``bytes_down``,
    ``evaluation_bytes_down``, ``query_bytes_down``, …), because a round without any training
    message may still be evaluated.
    """

    def __init__(self, directory: RunWriter | None = None) -> None:
        self.directory = directory
        self.row: dict[str, float] = {}
        self._evaluated = 0
        self._seconds: list[float] = []
        self._began = monotonic()

    def begin(self) -> None:
        """Begin a new round with zero training messages."""
        self._began = monotonic()
        self.row = {"cohort": 0, "messages": 0, "bytes_down": 0, "bytes_up": 0}

    def count_messages(self, kind: str, number: int, size: int) -> None:
        """Count messages to clients, and their bytes.

        Their ``kind`` is ``train``, ``evaluate`` or ``query``.
        """
        self._count(_PREFIXES[kind] + "messages", number)
        self._count(_PREFIXES[kind] + "bytes_down", size)

    def count_replies(self, kind: str, number: int, size: int, refusals: Sequence[str]) -> None:
        """Count replies and their bytes, and log ``refusals``."""
        self._count(_PREFIXES[kind] + "messages", number)
        self._count(_PREFIXES[kind] + "bytes_up", size)
        self._count("refused", len(refusals))
        for refusal in refusals[:MOST_SHOWN]:
            log.warning("refused reply: %s", refusal)
        if (more := len(refusals) - MOST_SHOWN) > 0:
            file = "missing.jsonl in the run directory"
            where = "strategy.refusals" if self.directory is None else file
            log.warning("and %d more were refused (%s has the reasons)", more, where)

    def missing(
        self, kind: str, server_round: int, partitions: Sequence[int], refusals: Sequence[str]
    ) -> None:
        """Record which clients gave no usable answer in a phase of a round, and why."""
        log.warning("round %d, %s: no usable answer from %s", server_round, kind, partitions)
        if self.directory is not None:
            self.directory.log_missing(server_round, kind, partitions, refusals)

    def scores(self, by_client: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Return mean, std, variance, worst tenth and Jain's index of each score over clients.

        These statistics weight all clients equally. ``…_pooled`` is the mean over all test
        examples, so large clients weigh more. The result has a score only if most clients
        report it. If some clients do not report it, ``…_clients`` is the number of those that do,
        and the statistics cover only these clients.
        """
        everyone = list(by_client)
        summary: dict[str, float] = {}
        for name in sorted(reported_by_most(everyone) - {"num-examples"}):
            reporting = [scores for scores in everyone if name in scores]
            values = [scores[name] for scores in reporting]
            spread = summarize(values, lower_is_better=is_loss(name))
            summary |= {f"{name}_{part}": value for part, value in vars(spread).items()}
            if len(reporting) < len(everyone):
                summary[f"{name}_clients"] = len(reporting)
            sizes = [scores.get("num-examples", 0.0) for scores in reporting]
            # The sizes are those of test sets, so they cannot weight losses on training examples.
            if name != "training_loss" and all(size > 0 for size in sizes):
                summary[f"{name}_pooled"] = float(np.average(values, weights=sizes))
        self.row |= summary
        return summary

    def end(self, server_round: int, num_rounds: int) -> None:
        """Write one line to the log and one row to the run directory."""
        phrases = [f"round {server_round}/{num_rounds}", *_in_words(self.row)]
        self._seconds.append(monotonic() - self._began)
        seconds = round(float(np.mean(self._seconds)) * (num_rounds - server_round))
        if seconds > 0:
            phrases.append(f"{timedelta(seconds=seconds)} left")
        log.info(" · ".join(phrases))
        self.add(server_round)

    def add(self, server_round: int) -> None:
        """Write the numbers so far to the run directory, as a part of this round's metrics."""
        if _EVALUATED in self.row:
            self._evaluated = server_round
        if self.directory is not None:
            self.directory.log(server_round, **self.row)

    def evaluated(self, server_round: int) -> bool:
        """Return True if the server asked for scores after the newest round, ``server_round``."""
        if self.directory is not None and self.directory.resumed:
            return server_round in self.directory.metrics().series(_EVALUATED)[0]
        return server_round == self._evaluated

    def count_as_query(self) -> None:
        """Count the ``evaluate`` messages of this row as ``query`` messages."""
        for name in ("messages", "bytes_down", "bytes_up"):
            self._count(f"query_{name}", self.row.pop(f"evaluation_{name}", 0))

    def _count(self, name: str, number: float) -> None:
        self.row[name] = self.row.get(name, 0) + number


def _in_words(row: Mapping[str, float]) -> list[str]:
    """Return phrases that say what a round achieved and cost, from its metrics."""
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
