"""The directory that a run leaves behind.

``run.json`` (configuration, versions, status), ``metrics.jsonl`` (one line a round),
``missing.jsonl`` (who was asked and gave no usable answer),
``ledger.jsonl``, ``guarantee.json``, ``clients.csv``, ``users.csv`` (records of each user in each
silo), ``model.safetensors``, and the report.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from flower_ext.privacy import Guarantee, Ledger

Status = Literal["running", "completed", "budget-exhausted", "failed"]

_PACKAGES = ("flower-ext", "flwr", "torch", "numpy", "opacus", "dp-accounting", "ray")


class NotARun(ValueError):
    """A path is no run directory, or may not become one."""


class RunDirectory:
    """Files of one run; make with `create`, read with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunDirectory:
        """Make a new run directory.

        Raises
        ------
        NotARun
            The path exists and is not an empty directory: nothing is ever overwritten.
        """
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise NotARun(f"run directory {path} is not empty; name a new one")
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run._write_facts(
            {
                "config": dict(config),
                "status": "running",
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": _versions(),
            }
        )
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run directory.

        Raises
        ------
        NotARun
            There is no ``run.json``.
        """
        if not (Path(path) / "run.json").is_file():
            raise NotARun(f"{path} holds no run.json: it is not a run directory")
        return cls(Path(path))

    @property
    def facts(self) -> dict[str, Any]:
        """Contents of ``run.json``."""
        facts: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return facts

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration."""
        config: dict[str, Any] = self.facts["config"]
        return config

    @property
    def ledger_path(self) -> Path:
        """Where the run's ledger is."""
        return self.path / "ledger.jsonl"

    def ledger(self) -> list[dict[str, Any]]:
        """Verified ledger entries; none for a run without privacy."""
        return Ledger.read(self.ledger_path) if self.ledger_path.exists() else []

    def log(self, round: int, **metrics: float) -> None:
        """Append one round's metrics.

        Raises
        ------
        ValueError
            A metric is not finite.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name}={value!r} of round {round} is not finite")
        with (self.path / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"round": round, **metrics}) + "\n")

    def metrics(self) -> list[dict[str, float]]:
        """All rounds' metrics, in order; a last line torn by a crash is left out."""
        return self._lines("metrics.jsonl")

    def log_missing(
        self, round: int, kind: str, partitions: Sequence[int], refusals: Sequence[str]
    ) -> None:
        """Append who was asked in a phase and gave no usable answer, and what was refused there."""
        line = {"round": round, "kind": kind, "partitions": list(partitions)}
        with (self.path / "missing.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "refusals": list(refusals)}) + "\n")

    def missing(self) -> list[dict[str, Any]]:
        """Phases in which somebody did not answer: round, kind, partitions, refusals."""
        return self._lines("missing.jsonl")

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(rounds, values) of one metric, where it was measured."""
        rows = [row for row in self.metrics() if name in row]
        return [row["round"] for row in rows], [row[name] for row in rows]

    def save_guarantees(self, guarantees: Sequence[Guarantee]) -> None:
        """Write ``guarantee.json``."""
        self._write_json("guarantee.json", [guarantee.to_dict() for guarantee in guarantees])

    def guarantees(self) -> list[Guarantee]:
        """What protects the clients; none for a run without privacy."""
        path = self.path / "guarantee.json"
        if not path.exists():
            return []
        return [Guarantee.from_dict(facts) for facts in json.loads(path.read_text())]

    def save_client_metrics(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write ``clients.csv``: the last evaluation, one row a client, empty where undefined."""
        if not rows:
            return
        with (self.path / "clients.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(dict.fromkeys(n for row in rows for n in row)))
            writer.writeheader()
            writer.writerows(rows)

    def client_metrics(self) -> list[dict[str, float]]:
        """The last evaluation, one row a client."""
        path = self.path / "clients.csv"
        if not path.exists():
            return []
        with path.open(newline="") as stream:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(stream)]

    def save_user_records(self, histogram: np.ndarray) -> None:
        """Write ``users.csv`` from numbers of records (silos, users): one row a user."""
        with (self.path / "users.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["user", *(f"silo {silo}" for silo in range(len(histogram)))])
            writer.writerows([user, *own] for user, own in enumerate(histogram.T.tolist()))

    def user_records(self) -> np.ndarray | None:
        """Numbers of records (silos, users), where they were saved."""
        path = self.path / "users.csv"
        if not path.exists():
            return None
        with path.open(newline="") as stream:
            rows = [[int(number) for number in row[1:]] for row in list(csv.reader(stream))[1:]]
        return np.asarray(rows, dtype=np.int64).T

    def save_model(self, params: Mapping[str, torch.Tensor | np.ndarray]) -> None:
        """Write the global model as ``model.safetensors``, whole or not at all."""
        tensors = {
            name: torch.as_tensor(value).detach().cpu().clone().contiguous()
            for name, value in params.items()
        }
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            draft = Path(folder) / "model"
            save_file(tensors, draft)
            draft.replace(self.path / "model.safetensors")

    def finish(self, status: Status, reason: str | None = None, **summary: float) -> None:
        """Record how the run ended."""
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"status": status, "reason": reason, "finished": finished, "summary": summary}
        self._write_facts({**self.facts, **facts})

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        self._write_json("run.json", facts)

    def _write_json(self, name: str, value: Any) -> None:
        draft = self.path / f".{name}.draft"
        with draft.open("w") as stream:
            json.dump(value, stream, indent=2, ensure_ascii=False)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.path / name)


def new_run_path(root: Path, name: str, started: datetime) -> Path:
    """A path below ``root`` that does not exist yet, named by what ran and when."""
    stem = f"{started:%Y%m%d-%H%M%S}-{name}"
    candidates = (root / (stem if n == 0 else f"{stem}-{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
