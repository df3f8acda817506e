"""``flower-ext search``: choose T and λ of DP-Ditto by short in-process runs of an app."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from flower_ext.cli.ending import LaunchFailed
from flower_ext.cli.launch import launch
from flower_ext.cli.preparing import RunOptions, prepare
from flower_ext.cli.screen import Settings, console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.planning import EmpiricalSchedule, Outcome, alternating_search
from flower_ext.runs.directory import RunDirectory

LOSS, SPREAD = "training_loss_mean", "training_loss_std"


def search(
    app_folder: Annotated[
        Path, typer.Argument(metavar="APP", help="Folder of an app like apps/dp-ditto.")
    ],
    rounds: Annotated[list[int], typer.Option(help="Candidate for T; repeatable.")],
    global_weight: Annotated[list[float], typer.Option(help="Candidate for λ; repeatable.")],
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs for each pair, with seeds 1, 2, …")
    ] = 1,
    settings: Settings = None,
    runs: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("search"),
) -> None:
    """Choose T and λ for a privacy budget by short runs, for models that no bound covers.

    The search alternates: it picks the T with the smallest training loss of the personal models at
    the current λ, then the λ at which these losses differ least between clients, until both stay
    the same. It reads losses without noise, so use it on simulations or public stand-in data only.

    Example: flower-ext search apps/dp-ditto --rounds 5 --rounds 20 --global-weight 0
    --global-weight 0.5 --set epsilon=10
    """
    schedule = search_by_runs(
        app_folder,
        rounds=rounds,
        global_weights=global_weight,
        seeds=range(1, seeds + 1),
        settings=settings or (),
        folder=runs,
    )
    columns = ("T", "λ", "mean", "std over clients")
    table = titled_table("Training losses of personal models", columns)
    for (T, weight), outcome in sorted(schedule.outcomes.items()):
        table.add_row(str(T), f"{weight:g}", f"{outcome.loss:.4g}", f"{outcome.unfairness:.4g}")
    console.print(table)
    how = "both stay" if schedule.settled else "the search cycles; smallest loss of the cycle"
    console.print(f"T* = {schedule.rounds}, λ* = {schedule.global_weight:g} ({how})")


def search_by_runs(
    app: Path,
    *,
    rounds: Sequence[int],
    global_weights: Sequence[float],
    seeds: Sequence[int],
    settings: Sequence[str] = (),
    folder: Path,
) -> EmpiricalSchedule:
    """Choose T by the personal models' training loss, and λ by its spread (DP-Ditto, Section V-C).

    The search runs every pair (T, λ) once for each seed, with the noise that T rounds need. It
    compares means over the seeds.

    Parameters
    ----------
    app : Path
        Folder of an app with the settings ``rounds``, ``global-weight``, ``seed``,
        ``evaluate-every``, ``training-loss`` and ``state-folder`` of ``apps/dp-ditto``.
    rounds : Sequence[int]
        Candidates for T.
    global_weights : Sequence[float]
        Candidates for λ.
    seeds : Sequence[int]
        Seeds, at least one.
    settings : Sequence[str]
        Further run-config overrides, ``name=value``.
    folder : Path
        Folder in which the run directories are created.

    Raises
    ------
    InvalidValue
        There are no candidates or seeds, or a candidate is out of range.
    LaunchFailed
        A run failed or exhausted its budget, or the app evaluates no training losses.
    """
    if not seeds:
        raise InvalidValue("seeds=[]: expected at least one integer")

    def outcome(T: int, weight: float) -> Outcome:
        results = [_run(app, T, weight, seed, settings, folder) for seed in seeds]
        losses, spreads = np.transpose(results)
        return Outcome(loss=float(np.mean(losses)), unfairness=float(np.mean(spreads)))

    return alternating_search(outcome, rounds=rounds, global_weights=global_weights)


def _run(
    app: Path, T: int, weight: float, seed: int, settings: Sequence[str], folder: Path
) -> tuple[float, float]:
    """Return the loss and its spread after the last round; NaN if training diverged."""
    path = folder.absolute() / f"T-{T}-weight-{weight:g}-seed-{seed}"
    if path.exists():
        raise LaunchFailed(f"{path} exists: name another folder for the run directories")
    changes = {
        "rounds": T,
        "global-weight": weight,
        "seed": seed,
        "evaluate-every": T,
        "training-loss": "true",
        "run-directory": path,
        "state-folder": "",  # nobody resumes these short runs
    }
    words = [*settings, *(f"{name}={value}" for name, value in changes.items())]
    launch(prepare(RunOptions(app=app, settings=words, in_process=True)))
    run = RunDirectory.open(path)
    if run.facts["status"] == "budget-exhausted":
        raise LaunchFailed(f"{path}: {run.facts['reason']}")
    last = run.metrics()[-1]
    if "loss_mean" in last and LOSS not in last:
        raise LaunchFailed(
            f"{path} has no {LOSS}: the app has to evaluate training losses, by a setting "
            "'training-loss' as in apps/dp-ditto"
        )
    return last.get(LOSS, math.nan), last.get(SPREAD, math.nan)
