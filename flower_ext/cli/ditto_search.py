"""``flower-ext search``: choose T and λ of DP-Ditto by short in-process runs of an app."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flower_ext.cli.ending import LaunchFailed
from flower_ext.cli.launch import launch
from flower_ext.errors import InvalidValue
from flower_ext.planning import EmpiricalSchedule, Outcome, alternating_search
from flower_ext.runs.directory import RunDirectory

LOSS, SPREAD = "training_loss_mean", "training_loss_std"


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
        found = [_run(app, T, weight, seed, settings, folder) for seed in seeds]
        losses, spreads = np.transpose(found)
        return Outcome(loss=float(np.mean(losses)), unfairness=float(np.mean(spreads)))

    return alternating_search(outcome, rounds=rounds, global_weights=global_weights)


def _run(
    app: Path, T: int, weight: float, seed: int, settings: Sequence[str], folder: Path
) -> tuple[float, float]:
    """Return the loss and its spread after the last round; NaN if training diverged."""
    path = folder.absolute() / f"T-{T}-weight-{weight:g}-seed-{seed}"
    if path.exists():
        raise LaunchFailed(f"{path} exists: name another folder for the run directories")
    own = {
        "rounds": T,
        "global-weight": weight,
        "seed": seed,
        "evaluate-every": T,
        "training-loss": "true",
        "run-directory": path,
        "state-folder": "",  # nobody resumes these short runs
    }
    launch(app, settings=[*settings, *(f"{n}={v}" for n, v in own.items())], in_process=True)
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
