"""``flower-ext search``: T and λ in turns, each by the in-process runs of an app."""

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
    """Section V-C of DP-Ditto: T by the personal models' training loss, λ by its spread.

    Every pair is run once for each seed, with noise for just its rounds; means over seeds decide.

    Parameters
    ----------
    app : Path
        Its settings are ``rounds``, ``global-weight``, ``seed``, ``evaluate-every``,
        ``training-loss`` and ``state-folder``, as those of ``apps/dp-ditto``.
    settings : Sequence[str]
        Other overrides, ``name=value``.
    folder : Path
        Where the run directories are made.

    Raises
    ------
    ValueError
        Nothing to try, or a candidate out of range.
    LaunchFailed
        A run ended in failure or at the end of its budget, or the app evaluates no training losses.
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
    """Loss and spread at the end; not numbers where training diverged."""
    path = folder.absolute() / f"T-{T}-weight-{weight:g}-seed-{seed}"
    if path.exists():
        raise LaunchFailed(f"{path} exists: name another folder")
    own = {
        "rounds": T,
        "global-weight": weight,
        "seed": seed,
        "evaluate-every": T,
        "training-loss": "true",
        "run-directory": path,
        "state-folder": "",  # short runs, which nobody resumes
    }
    launch(app, settings=[*settings, *(f"{n}={v}" for n, v in own.items())], in_process=True)
    run = RunDirectory.open(path)
    if run.facts["status"] == "budget-exhausted":
        raise LaunchFailed(f"{path}: {run.facts['reason']}")
    last = run.metrics()[-1]
    if "loss_mean" in last and LOSS not in last:
        raise LaunchFailed(f"{path} has no {LOSS}: the app evaluates no training losses")
    return last.get(LOSS, math.nan), last.get(SPREAD, math.nan)
