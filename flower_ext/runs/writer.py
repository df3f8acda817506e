"""Write a run directory: begin or continue it, record its rounds, and note how it ended."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.files import append_line, lock, write_rows, write_whole
from flower_ext.privacy import Budget, Guarantee, Ledger
from flower_ext.runs.directory import LOCK, RUN_FILE, NotARun, RunDirectory, Status

if TYPE_CHECKING:
    import torch

_BEFORE_A_RUN = (LOCK, f".{RUN_FILE}.*.draft")
"""Patterns of files that a run leaves if it ends before its ``run.json`` is written."""
_ENDED = ("reason", "finished", "summary", "accounted")
"""Entries of ``run.json`` that a run has only after its end."""
_PACKAGES = ("flower-ext", "flwr", "torch", "numpy", "opacus", "dp-accounting", "ray")


class RunWriter(RunDirectory):
    """The files of a run in progress: make them with `create`, or continue them with `resume`.

    ``accounted`` is true if ``guarantee.json`` covers all requests to clients so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.accounted = False
        self.on_round: Callable[[int, Mapping[str, float]], None] | None = None
        """Called with every row that `log` has written."""
        self._open = ExitStack()
        self._before: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunWriter:
        """Make a new run directory, which no other run may write to before it is closed.

        Raises
        ------
        NotARun
            The path exists and is not an empty directory (nothing is ever overwritten), or the
            directory cannot be made.
        InUse
            Another run has just begun there.
        """
        path = Path(path)
        run = cls(path)
        try:
            if path.exists() and (
                not path.is_dir()
                or any(not any(map(each.match, _BEFORE_A_RUN)) for each in path.iterdir())
            ):
                raise NotARun(f"run directory {path} is not empty; name a new one")
            path.mkdir(parents=True, exist_ok=True)
            # If two runs found the directory empty, only one gets the lock.
            run._open.enter_context(lock(path / LOCK))
        except OSError as error:
            raise NotARun(f"run directory {path} cannot be made: {error}") from error
        run._write_json(
            RUN_FILE,
            {
                "id": uuid4().hex,
                "config": dict(config),
                "status": "running",
                "started": _now(),
                "starts": [{"started": _now()}],
                "versions": _versions(),
            },
        )
        return run

    @classmethod
    def resume(cls, path: Path) -> RunWriter:
        """Continue a run that was interrupted, or extend one that is complete.

        Raises
        ------
        NotARun
            There is no ``run.json``.
        InUse
            A process still writes the run.
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
        """Undo this start in ``run.json`` if it finished no round; return True in that case."""
        idle: bool = self.metadata["starts"][-1]["after_round"] == len(self.metrics())
        if idle:
            self._write_json(RUN_FILE, self._before)
        return idle

    def close(self) -> None:
        """Close the run's ledgers, and let another process continue the run."""
        self._open.close()

    def open_ledger(self, *, budget: Budget | None = None) -> Ledger:
        """Open the run's ledger until the directory is closed (see `Ledger`)."""
        return self._open.enter_context(closing(Ledger(self.ledger_path, budget=budget)))

    def log(self, round: int, **metrics: float) -> None:
        """Add one round's metrics to ``metrics.jsonl``, and call ``on_round``.

        Raises
        ------
        ValueError
            A metric is not finite.
        OSError
            The line could not be written.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise InvalidValue(
                    f"metric {name}={value!r} of round {round}: expected a finite number"
                )
        line = json.dumps({"round": round, **metrics}).encode()
        append_line(self.metrics_path, line, sync=False)
        if self.on_round is not None:
            self.on_round(round, metrics)

    def forget_rounds(self, after: int) -> None:
        """Drop the rows of rounds above ``after``, which will be repeated."""
        for file in (self.metrics_path, self.path / "missing.jsonl"):
            if file.exists():
                kept = [row for row in self._lines(file.name) if row["round"] <= after]
                write_whole(file, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def log_missing(
        self, round: int, kind: str, partitions: Sequence[int], refusals: Sequence[str]
    ) -> None:
        """Add a line to ``missing.jsonl``: the partitions that gave no usable answer in a phase.

        ``refusals`` are the reasons why the server refused replies in that phase.
        """
        line = {"round": round, "kind": kind, "partitions": list(partitions)}
        content = json.dumps({**line, "refusals": list(refusals)}).encode()
        append_line(self.path / "missing.jsonl", content, sync=False)

    def save_guarantees(self, guarantees: Sequence[Guarantee]) -> None:
        """Write ``guarantee.json``. The guarantees must cover all requests to clients so far."""
        self._write_json("guarantee.json", [guarantee.to_dict() for guarantee in guarantees])
        self.accounted = True

    def save_client_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``clients.csv``: the last evaluation, one row per client, empty where undefined."""
        if not rows:
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        write_rows(
            self.path / "clients.csv", names, [[row.get(n, "") for n in names] for row in rows]
        )

    def save_model(self, params: Mapping[str, torch.Tensor | np.ndarray]) -> None:
        """Write the global model as ``model.safetensors``, whole or not at all."""
        import torch  # takes seconds, which commands that only read a run do without
        from safetensors.torch import save

        tensors = {
            name: torch.as_tensor(value).detach().cpu().clone().contiguous()
            for name, value in params.items()
        }
        write_whole(self.path / "model.safetensors", save(tensors), private=False)

    def save_use(self, use: Mapping[str, Any]) -> None:
        """Write ``use.json``, from which ``flower-ext export`` builds a client's own model.

        It names the method, the number of clients, the records of an evaluation request, the round
        of each client's newest memory, and the fingerprint of the frozen parts.
        """
        self._write_json("use.json", dict(use))

    def note(self, **entries: str) -> None:
        """Add entries to ``run.json`` that only the caller knows, such as the app's folder."""
        self._write_json(RUN_FILE, {**self.metadata, **entries})

    def finish(self, status: Status, reason: str | None = None, **summary: float) -> None:
        """Record how the run ended, and whether its guarantees cover all of it."""
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
