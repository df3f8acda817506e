"""What a round cost and achieved: one row of numbers, one line in the log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import getLogger

import numpy as np
from flwr.app import Message

from flower_ext.evaluation import summarize
from flower_ext.federation.uploads import payload_bytes
from flower_ext.privacy import epsilon_text
from flower_ext.privacy.guarantee import LARGE_DELTA
from flower_ext.runs import RunDirectory
from flower_ext.runs.scores import lower_is_better, reported_by_most

log = getLogger("flwr")

MOST_SHOWN = 3
"""Refused replies of a phase that the log quotes; the run directory keeps all of them."""

_EVALUATED = "evaluation_messages"


class Progress:
    """Collects the numbers of a round, then writes them where the user looks.

    Training and other traffic are counted apart (``bytes_down``, ``evaluation_bytes_down``,
    ``query_bytes_down``, …): a round may cost no training message and still be evaluated.
    """

    def __init__(self, run: RunDirectory | None = None) -> None:
        self.run = run
        self.row: dict[str, float] = {}
        self._evaluated = 0

    def begin(self) -> None:
        """A new round: no training message so far."""
        self.row = {"cohort": 0, "messages": 0, "bytes_down": 0, "bytes_up": 0}

    def asked(self, kind: str, messages: Sequence[Message]) -> None:
        """Count messages to clients; ``kind`` is ``train``, ``evaluate`` or ``query``."""
        self._count(_prefix(kind) + "messages", len(messages))
        self._count(_prefix(kind) + "bytes_down", payload_bytes(messages))

    def answered(
        self, kind: str, replies: Iterable[Message], refusals: Sequence[str]
    ) -> Iterator[Message]:
        """Yield replies and count them; afterwards report the refusals that there are by then."""
        number = size = 0
        for reply in replies:
            number += 1
            size += payload_bytes((reply,))
            yield reply
        self._count(_prefix(kind) + "messages", number)
        self._count(_prefix(kind) + "bytes_up", size)
        self._count("refused", len(refusals))
        for refusal in refusals[:MOST_SHOWN]:
            log.warning("refused reply: %s", refusal)
        if (more := len(refusals) - MOST_SHOWN) > 0:
            log.warning(
                "and %d more were refused (the run directory's missing.jsonl says why)", more
            )

    def missing(
        self, kind: str, server_round: int, partitions: Sequence[int], refusals: Sequence[str]
    ) -> None:
        """Note who was asked and gave no usable answer, with what was refused in that phase."""
        log.warning("round %d, %s: no answer of use from %s", server_round, kind, partitions)
        if self.run is not None:
            self.run.log_missing(server_round, kind, partitions, refusals)

    def scores(self, by_client: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Mean, spread, variance, worst tenth and Jain's index over clients, which count alike.

        ``…_pooled`` is the mean over all test examples instead: large clients count more. A score
        is one that most clients report; the others have no say in it, and ``…_clients`` tells how
        many do, where not all.
        """
        everyone = list(by_client)
        summary: dict[str, float] = {}
        for name in sorted(reported_by_most(everyone) - {"num-examples"}):
            by_client = [scores for scores in everyone if name in scores]
            values = [scores[name] for scores in by_client]
            spread = summarize(values, lower_is_better=lower_is_better(name))
            summary |= {
                f"{name}_mean": spread.mean,
                f"{name}_std": spread.std,
                f"{name}_variance": spread.variance,
                f"{name}_worst_decile": spread.worst_decile,
                f"{name}_jain": spread.jain_index,
            }
            if len(by_client) < len(everyone):
                summary[f"{name}_clients"] = len(by_client)
            sizes = [scores.get("num-examples", 0.0) for scores in by_client]
            # Sizes are those of test sets; losses on training examples are not pooled by them.
            if name != "training_loss" and all(size > 0 for size in sizes):
                summary[f"{name}_pooled"] = float(np.average(values, weights=sizes))
        self.row |= summary
        return summary

    def end(self, server_round: int, num_rounds: int) -> None:
        """One line in the log and in the run directory."""
        row, parts = self.row, [f"round {server_round}/{num_rounds}"]
        if "accuracy_mean" in row:
            mean, worst = row["accuracy_mean"], row["accuracy_worst_decile"]
            parts.append(f"accuracy {mean:.3f} (worst tenth {worst:.3f})")
        for name in ("provable", "published"):
            if (epsilon := row.get(f"epsilon_{name}")) is not None:
                parts.append(f"ε {epsilon_text(epsilon)} {name}")
        if (delta := row.get("delta", 0)) > LARGE_DELTA:
            parts.append(f"δ {delta:.3g} is large")
        if not row.get("messages"):
            parts.append("no client was asked to train")
        if "answered" in row:
            parts.append(f"{row['answered']:.0f} of {row['cohort']:.0f} answered")
        if refused := row.get("refused", 0):
            parts.append(f"{refused:.0f} refused")
        log.info(" · ".join(parts))
        self.add(server_round)

    def add(self, server_round: int) -> None:
        """Write the row down; the run directory adds it to what it has of this round."""
        if _EVALUATED in self.row:
            self._evaluated = server_round
        if self.run is not None:
            self.run.log(server_round, **self.row)

    def evaluated(self, server_round: int) -> bool:
        """Whether scores were asked for after this round, which is the last so far."""
        if self.run is not None and self.run.resumed:
            rounds, _ = self.run.series(_EVALUATED)
            return server_round in rounds
        return server_round == self._evaluated

    def _count(self, name: str, number: float) -> None:
        self.row[name] = self.row.get(name, 0) + number


class Remaining:
    """Says in the log how far a long piece of work is, and when it will be done.

    Call it with how many are done, and of how many; short work says nothing.

    Parameters
    ----------
    what : str
        Names the work.
    every : float
        Seconds between two lines.
    """

    def __init__(self, what: str, *, every: float = 10.0) -> None:
        self.what = what
        self.every = every
        self._started = self._last = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """Note progress; a line if the last is long ago."""
        now = time.monotonic()
        if now - self._last < self.every or not 0 < done < of:
            return
        self._last = now
        left = (now - self._started) * (of - done) / done
        log.info("%s: %d of %d, %.0f s left", self.what, done, of, left)


def _prefix(kind: str) -> str:
    return {"train": "", "evaluate": "evaluation_", "query": "query_"}[kind]
