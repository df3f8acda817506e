"""The directory that a run leaves behind.

=====================  ====================================================================
file                   content
=====================  ====================================================================
``run.json``           configuration, versions, starts and status
``terms.json``         the terms that a resumed run must have, too (`run_terms`)
``metrics.jsonl``      metrics, one or two lines per round
``missing.jsonl``      clients that gave no usable answer to a request
``ledger.jsonl``       the ledger of releases
``guarantee.json``     guarantees
``clients.csv``        the last evaluation, one row per client
``model.safetensors``  the global model
``use.json``           what a client needs to build its own model from the global one
``checkpoints/``       state from which the run can be resumed
``secrets/``           state of correlated noise, which only the server may know
``state/``             memory of the clients of a simulation, such as personal models
``report.md, .html``   the report, with its figures in ``figures/``
=====================  ====================================================================

Only the server's operator may read the files (mode 0600), except the model. The files reveal which
clients were drawn and how many, and the values that clients reported without noise.
"""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.files import LAST_MOMENTS, append_line, lock, write_rows, write_whole
from flower_ext.privacy import Budget, Guarantee, Ledger

if TYPE_CHECKING:
    import torch

Status = Literal["running", "completed", "budget-exhausted", "failed"]

RUNS_VARIABLE = "FLOWER_EXT_RUNS"
"""Environment variable that names the folder for new run directories."""

RUN_FILE, LOCK = "run.json", ".lock"
"""Names of the file that makes a folder a run directory, and of the lock of its writer."""
_METADATA = {"id", "config", "status", "started", "starts", "versions"}
"""Entries that every ``run.json`` has."""
_RENEWED = ("guarantee.json", "clients.csv", "use.json")
"""Files that a run rewrites when it is resumed or ends."""
_ENDED = ("reason", "finished", "summary", "accounted")
"""Entries of ``run.json`` that a run has only after its end."""
_PACKAGES = ("flower-ext", "flwr", "torch", "numpy", "opacus", "dp-accounting", "ray")


NoisedNumber = tuple[int, float, float]
"""A number that a query released: the round, the value, and the standard error due to noise."""


class NotARun(InvalidValue):
    """A path is not a run directory, cannot become one, or holds a file that cannot be read."""


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
        """Return the sum of the metrics ``names`` over all rounds."""
        return sum(row.get(name, 0) for row in self for name in names)

    def noised(self) -> dict[str, NoisedNumber]:
        """Return the newest value of each number ``x`` that has a standard error ``x_error``."""
        return {
            name: (int(row["round"]), row[name], row[f"{name}_error"])
            for row in self
            for name in row
            if f"{name}_error" in row
        }

    def noised_scores(self) -> dict[str, NoisedNumber]:
        """Return the means that the last secure evaluation released, by the scores' names."""
        evaluated = self.series("scored_clients")[0][-1:]
        return {
            name.removesuffix("_mean"): number
            for name, number in self.noised().items()
            if name.endswith("_mean") and number[0] in evaluated
        }


class RunDirectory:
    """The files of one run in the directory ``path``, for reading; a `RunWriter` writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger_path, self.metrics_path = path / "ledger.jsonl", path / "metrics.jsonl"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing run directory; one without ``run.json`` is refused as `NotARun`."""
        if not (Path(path) / RUN_FILE).is_file():
            raise NotARun(f"{path} holds no {RUN_FILE}: expected the directory of a run")
        return cls(Path(path))

    def check_free(self, *, seconds: float = LAST_MOMENTS) -> None:
        """Wait until no process writes to the run directory; after ``seconds``, raise `InUse`."""
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
        """State of the run: "running", "completed", "budget-exhausted" or "failed"."""
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

    def has_used_data(self) -> bool:
        """Return True if the run may have used anybody's data."""
        marks = (self.ledger_path, self.path / "checkpoints" / "begun.jsonl")
        return bool(self.metrics()) or any(m.exists() and m.stat().st_size for m in marks)

    def ledger(self) -> list[dict[str, Any]]:
        """Return the ledger's verified entries; an empty list if the run has no ledger."""
        return Ledger.read(self.ledger_path) if self.ledger_path.exists() else []

    def metrics(self) -> Rounds:
        """Return all rounds' metrics in order, with all rows of one round merged into one."""
        rounds: dict[float, dict[str, float]] = {}
        for row in self._lines(self.metrics_path.name):
            rounds[row["round"]] = rounds.get(row["round"], {}) | row
        return Rounds(rounds.values())

    def missing(self) -> list[dict[str, Any]]:
        """Return the lines of ``missing.jsonl``, each with round, kind, partitions and refusals."""
        return self._lines("missing.jsonl")

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
        """Yield a file's text, empty if there is no file; errors in the block become `NotARun`."""
        path = self.path / name
        try:
            yield path.read_text(encoding="utf-8") if path.exists() else ""
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            renewed = ", or resume the run, which writes it again" if name in _RENEWED else ""
            raise NotARun(
                f"file {path} is damaged ({error}): restore it from a copy{renewed}"
            ) from error

    def _lines(self, name: str) -> list[dict[str, Any]]:
        with self._reading(name) as text:
            # A crash may have cut off the last line, which then lacks its line break.
            rows = [dict(json.loads(line)) for line in text.split("\n")[:-1]]
            if not all("round" in row for row in rows):
                raise InvalidValue("a row lacks its round")
        return rows


class RunWriter(RunDirectory):
    """The files of a run in progress. `create` makes the files, and `resume` continues them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.accounted = False
        """True if ``guarantee.json`` covers all requests to clients so far."""
        self.on_round: Callable[[int, Mapping[str, float]], None] | None = None
        """Called with every row that `log` has written."""
        self._open = ExitStack()
        self._before: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunWriter:
        """Make a new run directory, and lock it against other runs until `close`.

        The error is `NotARun` if the directory cannot be made or is not empty: nothing is ever
        overwritten. The error is `InUse` if another run has just begun there.
        """
        path = Path(path)
        run = cls(path)
        try:
            # A run that ends before its ``run.json`` is written leaves these.
            left = (LOCK, f".{RUN_FILE}.*.draft")
            if path.exists() and (
                not path.is_dir() or not all(any(map(each.match, left)) for each in path.iterdir())
            ):
                raise NotARun(f"run directory {path} is not empty; name a new one")
            path.mkdir(parents=True, exist_ok=True)
            # If two runs found the directory empty, only one gets the lock.
            run._open.enter_context(lock(path / LOCK))
        except OSError as error:
            raise NotARun(f"run directory {path} cannot be made: {error}") from error
        metadata = {
            "id": uuid4().hex,
            "config": dict(config),
            "status": "running",
            "started": _now(),
            "starts": [{"started": _now()}],
            "versions": _versions(),
        }
        run._write_json(RUN_FILE, metadata)
        return run

    @classmethod
    def resume(cls, path: Path) -> RunWriter:
        """Continue a run that was interrupted, or extend one that is complete.

        The error is `InUse` if a process still writes to the run directory, and `NotARun` as in
        `open`.
        """
        run = cls.open(path)
        run._open.enter_context(lock(run.path / LOCK))
        run._before = run.metadata
        run.accounted = bool(run.metadata.get("accounted"))
        metadata = {name: value for name, value in run.metadata.items() if name not in _ENDED}
        start = {"started": _now(), "after_round": len(run.metrics())}
        if (versions := _versions()) != metadata["versions"]:
            start["versions"] = versions
        starts = [*metadata["starts"], start]
        run._write_json(RUN_FILE, {**metadata, "status": "running", "starts": starts})
        return run

    def withdraw(self) -> bool:
        """Restore ``run.json`` as it was before `resume`, and return True.

        If a round has ended since then, change nothing, and return False.
        """
        idle: bool = self.metadata["starts"][-1]["after_round"] == len(self.metrics())
        if idle:
            self._write_json(RUN_FILE, self._before)
        return idle

    def close(self) -> None:
        """Close the run's ledgers, and let another process continue the run."""
        self._open.close()

    def open_ledger(self, *, budget: Budget | None = None) -> Ledger:
        """Open the run's `Ledger`, which stays open until `close` is called."""
        return self._open.enter_context(closing(Ledger(self.ledger_path, budget=budget)))

    def log(self, server_round: int, **metrics: float) -> None:
        """Add one round's metrics to ``metrics.jsonl``, then call ``on_round`` if it is set.

        A metric that is not finite is refused as `InvalidValue`.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise InvalidValue(
                    f"metric {name}={value!r} of round {server_round}: expected a finite number"
                )
        line = json.dumps({"round": server_round, **metrics}).encode()
        append_line(self.metrics_path, line, sync=False)
        if self.on_round is not None:
            self.on_round(server_round, metrics)

    def forget_rounds(self, after: int) -> None:
        """Delete the rows of rounds above ``after``, because the run will repeat these rounds."""
        for file in (self.metrics_path, self.path / "missing.jsonl"):
            if file.exists():
                kept = [row for row in self._lines(file.name) if row["round"] <= after]
                write_whole(file, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def log_missing(
        self, server_round: int, kind: str, partitions: Sequence[int], refusals: Sequence[str]
    ) -> None:
        """Add a line to ``missing.jsonl``: the partitions without a usable answer to a request.

        ``refusals`` are the reasons why the server refused replies.
        """
        line = {"round": server_round, "kind": kind, "partitions": list(partitions)}
        content = json.dumps({**line, "refusals": list(refusals)}).encode()
        append_line(self.path / "missing.jsonl", content, sync=False)

    def save_guarantees(self, guarantees: Sequence[Guarantee]) -> None:
        """Write ``guarantee.json``; the guarantees must cover all requests to clients so far."""
        self._write_json("guarantee.json", [guarantee.to_dict() for guarantee in guarantees])
        self.accounted = True

    def save_client_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``clients.csv``; the cell of a score that a client did not report is empty."""
        if not rows:
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_rows(
            self.path / "clients.csv", names, [[row.get(n, "") for n in names] for row in rows]
        )

    def save_model(self, params: Mapping[str, torch.Tensor | np.ndarray]) -> None:
        """Write the global model as ``model.safetensors``, whole or not at all."""
        import torch  # takes seconds; commands that only read a run do not need it
        from safetensors.torch import save

        tensors = {
            name: torch.as_tensor(value).detach().cpu().clone().contiguous()
            for name, value in params.items()
        }
        write_whole(self.path / "model.safetensors", save(tensors), private=False)

    def save_use(self, use: Mapping[str, Any]) -> None:
        """Write ``use.json``, with which ``flower-ext export`` builds a client's own model."""
        self._write_json("use.json", dict(use))

    def first_terms(self, terms: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the terms with which the run began; a new run writes ``terms`` to disk."""
        with self._reading("terms.json") as text:
            if text:
                return dict(json.loads(text))
        self._write_json("terms.json", dict(terms))
        return terms

    def note(self, **entries: str) -> None:
        """Add ``entries`` to ``run.json``, for example the app's folder."""
        self._write_json(RUN_FILE, {**self.metadata, **entries})

    def finish(self, status: Status, reason: str | None = None, **summary: float) -> None:
        """Write into ``run.json`` how the run ended, and whether guarantees cover all requests."""
        outcome = {
            "status": status,
            "reason": reason,
            "finished": _now(),
            "accounted": self.accounted,
            "summary": summary,
        }
        self._write_json(RUN_FILE, {**self.metadata, **outcome})

    def _write_json(self, name: str, value: Any) -> None:
        content = json.dumps(value, indent=2, ensure_ascii=False).encode()
        write_whole(self.path / name, content)


def new_run_path(root: Path, name: str, started: datetime) -> Path:
    """Return the path of a new folder in ``root``, named by the time ``started`` and ``name``."""
    stem = f"{started:%Y%m%d-%H%M%S}-{name}"
    candidates = (root / (stem if n == 0 else f"{stem}-{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
