"""Runs of one app on a few processor cores, shared by the experiments; finished runs are kept."""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import track

from flower_ext.federation.engines.run_app import load_app, run_app
from flower_ext.runs import RunDirectory
from flower_ext.runs.app_settings import declared_settings, preset
from flower_ext.runs.figures import Chart, Line, draw_lines
from flower_ext.runs.settings import changed_settings, num_nodes

Config = dict[str, bool | float | int | str]
APPS = Path(__file__).parents[1] / "apps"
SEARCH_SEED = 1001
"""First seed of a search: trials see other clients, models and noise than the reported runs."""


def app_module(app: str, name: str) -> ModuleType:
    """Import a module of an app, such as ``silos`` of ``uldp-fl``."""
    load_app(APPS / app)
    return import_module(f"{app.replace('-', '_')}_app.{name}")


def preset_settings(app: str, name: str, **chosen: Any) -> Config:
    """Return the settings of an app's preset, with others chosen (underscores for hyphens)."""
    changes = {key.replace("_", "-"): value for key, value in chosen.items()}
    return {**preset(APPS / app, name).settings(changes), **changes}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs of one app in one folder, ``workers`` at a time."""

    app: Path
    folder: Path
    base: Config
    workers: int

    @classmethod
    def of(cls, arguments: argparse.Namespace, app: str, changes: Config) -> Experiment:
        """Return the experiment of a command line, with changes to the app's defaults."""
        data = arguments.data_folder and str(Path(arguments.data_folder).absolute())
        folder = arguments.output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        defaults, _ = declared_settings(APPS / app)
        base = defaults | changes | {"data-folder": data}
        return cls(app=APPS / app, folder=folder, base=base, workers=arguments.workers)

    def config(self, name: str, *changes: Config) -> Config:
        """Return the base with changes; the run is recorded as ``name``."""
        merged = dict(self.base)
        for more in changes:
            assert set(more) <= set(self.base), set(more) - set(self.base)
            merged |= more
        return {**merged, "run-directory": str(self.folder / "runs" / name)}

    def run(self, configs: Sequence[Config], title: str) -> list[RunDirectory]:
        """Run the configurations whose runs are missing; return all runs in their order."""
        load_app(self.app)  # workers are forks, and share what the app imports
        with ProcessPoolExecutor(self.workers) as pool:
            waiting = [pool.submit(run, self.app, config) for config in configs]
            for done in track(as_completed(waiting), total=len(waiting), description=title):
                done.result()  # an error ends the whole experiment, with its message
            return [future.result() for future in waiting]

    def grouped(
        self, cases: Mapping[str, Config], seeds: Iterable[int], title: str
    ) -> dict[str, list[RunDirectory]]:
        """Run each case under every seed; return its runs by the name of the case."""
        keys = [(name, seed) for seed in seeds for name in cases]
        configs = [
            self.config(f"{name}-{seed}", cases[name], {"seed": seed}) for name, seed in keys
        ]
        groups: dict[str, list[RunDirectory]] = {name: [] for name in cases}
        for (name, _), done in zip(keys, self.run(configs, title), strict=True):
            groups[name].append(done)
        return groups

    def scores(
        self,
        trials: Mapping[str, Sequence[Config]],
        score: Callable[[RunDirectory], float],
        title: str,
        *,
        fixed: Mapping[str, Config],
        seeds: int = 1,
    ) -> dict[str, list[tuple[float, Config]]]:
        """Return each trial with its mean score over the search's own seeds.

        Parameters
        ----------
        trials : Mapping[str, Sequence[Config]]
            Settings to try, by the name of what they are for.
        score : Callable[[RunDirectory], float]
            Score of a run: higher is better, and NaN, of a diverged run, is worst.
        fixed : Mapping[str, Config]
            Settings that all trials of a name share.
        """
        cases = {
            f"search/{name}-{'-'.join(map(str, trial.values()))}": {**fixed[name], **trial}
            for name, tried in trials.items()
            for trial in tried
        }
        search_seeds = range(SEARCH_SEED, SEARCH_SEED + seeds)
        groups = iter(self.grouped(cases, search_seeds, f"searching, {title}").values())
        return {
            name: [(_mean_or_worst(map(score, next(groups))), trial) for trial in tried]
            for name, tried in trials.items()
        }

    def best(
        self,
        trials: Mapping[str, Sequence[Config]],
        score: Callable[[RunDirectory], float],
        title: str,
        **options: Any,
    ) -> dict[str, Config]:
        """Return the trial with the highest score of each name; see `scores`."""
        found = self.scores(trials, score, title, **options)
        return {name: max(tried, key=lambda pair: pair[0])[1] for name, tried in found.items()}

    def draw(
        self,
        name: str,
        title: str,
        ylabel: str,
        lines: Mapping[str, Sequence[Line]],
        **options: Any,
    ) -> str:
        """Draw a figure of lines, and return the Markdown that shows it."""
        chart = Chart(title=title, ylabel=ylabel, lines=lines, **options)
        path = draw_lines(self.folder / "figures", name, chart)
        return f"![{title}](figures/{path.name})"

    def write(self, name: str, *parts: str) -> None:
        """Print a page, and write it to ``name.md``."""
        text = "\n\n".join(parts)
        (self.folder / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
        print(f"{text}\n")


def run(app: Path, config: Config) -> RunDirectory:
    """Run one configuration in this process, unless ``config["run-directory"]`` holds it already.

    Raises
    ------
    FileExistsError
        The directory holds a run with different settings.
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


def last_value(run: RunDirectory, metric: str) -> float:
    """Return the metric of the last evaluation; NaN if training diverged."""
    values = run.metrics().series(metric)[1]
    return values[-1] if values else math.nan


def last_values(runs: Sequence[RunDirectory], metric: str) -> list[float]:
    """Return the last value of ``metric`` of each run."""
    return [last_value(run, metric) for run in runs]


def differences(
    runs: Sequence[RunDirectory], others: Sequence[RunDirectory], metric: str
) -> list[float]:
    """Return by how much ``metric`` of each run exceeds that of the other run with its seed."""
    pairs = zip(last_values(runs, metric), last_values(others, metric), strict=True)
    return [value - other for value, other in pairs]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def mean_and_error(values: Sequence[float], digits: int = 4, sign: str = "+") -> str:
    """Return the mean and its standard error as text."""
    return f"{statistics.mean(values):{sign}.{digits}f} ± {standard_error(values):.{digits}f}"


def mean_and_std(values: Sequence[float], *, digits: int = 3) -> str:
    """Return ``mean ± sample standard deviation``, or just the value if there is only one."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _mean_or_worst(scores: Iterable[float]) -> float:
    mean = statistics.fmean(scores)
    return -math.inf if math.isnan(mean) else mean


def _check_same(run: RunDirectory, config: Config) -> None:
    """Refuse a run with different settings; the app chooses and records its own empty values.

    The folders do not count, because a run may have been moved or copied from another machine.
    """
    chosen = {name: value for name, value in config.items() if value != ""}
    if changed := changed_settings(run.config, chosen, free=("run-directory", "data-folder")):
        raise FileExistsError(
            f"{run.path} holds a run with another {', '.join(changed)}: name another output folder"
        )
