"""Many runs of one app on a few processor cores; finished runs are kept."""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.progress import track

from flower_ext.federation.engines.run_app import run_app
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import num_nodes

Config = dict[str, bool | float | int | str]


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command, with the options that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-folder", default="", help="folder of the data sets")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    return parser


def last(run: RunDirectory, metric: str) -> float:
    """Return the metric of the last evaluation; NaN if training diverged."""
    values = run.series(metric)[1]
    return values[-1] if values else math.nan


def over_seeds(runs: Sequence[RunDirectory], metric: str) -> list[float]:
    """Return the last value of ``metric`` of each run."""
    return [last(run, metric) for run in runs]


def settings(app: Path) -> Config:
    """Return the run-config defaults of an app."""
    project = tomllib.loads((app / "pyproject.toml").read_text())
    return dict(project["tool"]["flwr"]["app"]["config"])


def with_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return ``config`` with ``name=value`` texts, each read as the type of its default.

    Raises
    ------
    ValueError
        A name is unknown, or a value has another type.
    """
    changed = dict(config)
    for override in overrides:
        name, _, value = override.partition("=")
        if name not in config:
            raise ValueError(f"unknown run-config name {name!r}; expected one of {sorted(config)}")
        kind = type(config[name])
        changed[name] = value == "true" if kind is bool else kind(value)
    return changed


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs of one app in one folder, ``workers`` at a time."""

    app: Path
    folder: Path
    base: Config
    workers: int

    def config(self, name: str, *changes: Config) -> Config:
        """Return the base with changes; the run is recorded as ``name``."""
        merged = dict(self.base)
        for more in changes:
            assert set(more) <= set(self.base), set(more) - set(self.base)
            merged |= more
        return {**merged, "run-directory": str(self.folder / "runs" / name)}

    def run(self, configs: Sequence[Config], title: str) -> list[RunDirectory]:
        """Run the configurations whose runs are missing."""
        return run_all(self.app, configs, workers=self.workers, title=title)


def run(app: Path, config: Config) -> RunDirectory:
    """Run one configuration in this process, unless ``config["run-directory"]`` holds it already.

    Raises
    ------
    FileExistsError
        The directory holds a run with other settings.
    """
    path = Path(str(config["run-directory"]))
    if (path / "run.json").exists():
        earlier = RunDirectory.open(path)
        if earlier.status == "completed":
            _check_same(earlier, config)
            return earlier
        shutil.rmtree(path)  # remains of an interrupted or failed attempt
    # One thread per process: these models gain nothing from more, and results do not depend on it.
    import torch

    torch.set_num_threads(1)
    clients = num_nodes(config)
    assert clients is not None
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with redirect_stdout(StringIO()):
        run_app(app, config, clients=clients)
    return RunDirectory.open(path)


def run_all(
    app: Path, configs: Sequence[Config], *, workers: int, title: str
) -> list[RunDirectory]:
    """Run all configurations, ``workers`` at a time, with progress; return runs in their order."""
    with ProcessPoolExecutor(workers) as pool:
        waiting = [pool.submit(run, app, config) for config in configs]
        for done in track(as_completed(waiting), total=len(waiting), description=title):
            done.result()  # an error ends the whole experiment, with its message
        return [future.result() for future in waiting]


def _check_same(run: RunDirectory, config: Config) -> None:
    """Refuse a run with other settings; empty values are left to the app, which records its own."""
    other = [n for n, value in config.items() if value != "" and run.config.get(n) != value]
    if other:
        raise FileExistsError(
            f"{run.path} holds a run with another {', '.join(other)}: name another output folder"
        )
