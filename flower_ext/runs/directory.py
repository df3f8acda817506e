"""The directory that a run leaves behind.

=====================  ====================================================================
file                   content
=====================  ====================================================================
``run.json``           configuration, versions, starts and status
``metrics.jsonl``      metrics, one line per round
``missing.jsonl``      clients that gave no usable answer to a request
``ledger.jsonl``       the ledger of releases
``guarantee.json``     guarantees
``clients.csv``        the last evaluation, one row per client
``model.safetensors``  the global model
``use.json``           what a client needs to build its own model from the global one
``checkpoints/``       state from which the run can be resumed
``secrets/``           state of correlated noise, which only the server may know
``report.md, .html``   the report
=====================  ====================================================================

Only the server's operator may read the files (mode 0600), except the model. They reveal which
clients were drawn, how many, and the un-noised values that clients reported.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from flower_ext.errors import InvalidValue
from flower_ext.files import LAST_MOMENTS, lock
from flower_ext.privacy import Guarantee, Ledger

Status = Literal["running", "completed", "budget-exhausted", "failed"]

RUNS_VARIABLE = "FLOWER_EXT_RUNS"
"""Environment variable that names the folder for new run directories."""

RUN_FILE, LOCK = "run.json", ".lock"
"""Names of the file that makes a folder a run directory, and of the lock of its writer."""
_METADATA = {"id", "config", "status", "started", "starts", "versions"}
"""Entries that every ``run.json`` has."""
_RENEWED = ("guarantee.json", "clients.csv", "use.json")
"""Files that a run rewrites when it is resumed or ends."""
_CLIENTS, _MEAN, _ERROR = "scored_clients", "_mean", "_mean_error"
"""Name and endings of a secure evaluation's numbers in ``metrics.jsonl``."""


class NotARun(InvalidValue):
    """A path is not a run directory, cannot become one, or holds a file that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class NoisedScores:
    """Mean scores over all clients that a secure evaluation released, with noise.

    ``round`` is the round after which clients were evaluated, and ``clients`` the noised number of
    clients with scores. ``errors`` holds the standard errors of ``means`` due to noise.
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


class RunDirectory:
    """The files of one run, to read. A `RunWriter` writes them.

    ``path`` is the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing run directory for reading.

        Raises
        ------
        NotARun
            There is no ``run.json``.
        """
        if not (Path(path) / RUN_FILE).is_file():
            raise NotARun(f"{path} holds no {RUN_FILE}: expected the directory of a run")
        return cls(Path(path))

    def check_free(self, *, seconds: float = LAST_MOMENTS) -> None:
        """Wait until no process writes the run.

        Raises
        ------
        InUse
            A process still writes it after ``seconds``; the message names the process.
        """
        lock(self.path / LOCK, seconds=seconds).close()

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of ``run.json``."""
        with self._reading(RUN_FILE) as text:
            metadata: dict[str, Any] = json.loads(text)
            if missing := _METADATA - set(metadata):
                raise InvalidValue(f"it lacks {', '.join(sorted(missing))}")
        return metadata

    @property
    def status(self) -> Status:
        """State of the run: running, completed, ended by its budget, or failed."""
        status: Status = self.metadata["status"]
        return status

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration."""
        config: dict[str, Any] = self.metadata["config"]
        return config

    @property
    def id(self) -> str:
        """The id of the run, the same over all its starts."""
        return str(self.metadata["id"])

    @property
    def resumed(self) -> bool:
        """True if the run was continued after its first start."""
        return len(self.metadata["starts"]) > 1

    @property
    def ledger_path(self) -> Path:
        """Path of the run's ledger."""
        return self.path / "ledger.jsonl"

    def ledger(self) -> list[dict[str, Any]]:
        """Return verified ledger entries; empty for a run without privacy."""
        return Ledger.read(self.ledger_path) if self.ledger_path.exists() else []

    @property
    def metrics_path(self) -> Path:
        """Path of the rounds' metrics."""
        return self.path / "metrics.jsonl"

    def metrics(self) -> Rounds:
        """Return all rounds' metrics in order, with all rows of one round merged into one.

        A last line that a crash tore is left out.
        """
        rounds: dict[float, dict[str, float]] = {}
        for row in self._lines(self.metrics_path.name):
            rounds[row["round"]] = rounds.get(row["round"], {}) | row
        return Rounds(rounds.values())

    def missing(self) -> list[dict[str, Any]]:
        """Return the lines of ``missing.jsonl``: round, kind, partitions and refusals of each."""
        return self._lines("missing.jsonl")

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (rounds, values) of one metric, for the rounds that measured it."""
        return self.metrics().series(name)

    def guarantees(self) -> list[Guarantee]:
        """Return the run's guarantees; empty for a run without privacy."""
        with self._reading("guarantee.json") as text:
            return [Guarantee.from_dict(entry) for entry in json.loads(text or "[]")]

    def client_metrics(self) -> list[dict[str, float]]:
        """Return the last evaluation, one row per client."""
        with self._reading("clients.csv") as text:
            rows = csv.DictReader(io.StringIO(text))
            return [{name: float(score) for name, score in row.items() if score} for row in rows]

    def use(self) -> dict[str, Any]:
        """Return what a client needs to build its own model from the shared one; may be empty."""
        with self._reading("use.json") as text:
            return dict(json.loads(text or "{}"))

    @contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        """Yield a file's text, empty if it is missing; explain an error in the block."""
        path = self.path / name
        try:
            yield path.read_text(encoding="utf-8") if path.exists() else ""
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            renewed = ", or resume the run, which writes it again" if name in _RENEWED else ""
            raise NotARun(
                f"{path} is damaged ({error}): restore it from a copy{renewed}"
            ) from error

    def _lines(self, name: str) -> list[dict[str, Any]]:
        with self._reading(name) as text:
            # A crash may have torn the last line, which then has no end.
            rows = [dict(json.loads(line)) for line in text.split("\n")[:-1]]
            if not all("round" in row for row in rows):
                raise InvalidValue("a row lacks its round")
        return rows


def new_run_path(root: Path, name: str, started: datetime) -> Path:
    """Return a path below ``root`` that does not exist yet, named by what ran and when."""
    stem = f"{started:%Y%m%d-%H%M%S}-{name}"
    candidates = (root / (stem if n == 0 else f"{stem}-{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())
