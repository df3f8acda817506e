"""Curves of ``flower-ext ditto-schedule``, and its check on drawn federations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_ext.planning import LinearFairness
from flower_ext.planning.budget import CalibratedSchedule
from flower_ext.planning.convergence import LARGEST_WEIGHT
from flower_ext.planning.linear_federation import simulated_unfairness
from flower_ext.privacy.guarantee import Basis
from flower_ext.runs.figures import Line, draw_lines

CURVE_ROWS = 12
"""Largest number of evenly spread rows in the printed table; a row is a number of rounds."""


def curve_rows(schedules: Sequence[CalibratedSchedule]) -> list[dict[str, Any]]:
    """Return bound and weight of each basis for some T: evenly spaced logarithms, and each T*."""
    last = int(schedules[0].schedule.candidates[-1])
    spread = np.unique(np.geomspace(1, last, CURVE_ROWS).round().astype(int)).tolist()
    best = {answer.schedule.rounds for answer in schedules if answer.schedule.rounds}
    return [
        {"rounds": rounds, **{answer.basis: _at(answer, rounds) for answer in schedules}}
        for rounds in sorted({*spread, *best})
    ]


def _at(answer: CalibratedSchedule, rounds: int) -> dict[str, float]:
    schedule = answer.schedule
    return {
        "bound": float(schedule.convergence[rounds - 1]),
        "global_weight": float(schedule.global_weights[rounds - 1]),
    }


def draw_schedule(
    schedules: Sequence[CalibratedSchedule], folder: Path, *, fairness: LinearFairness | None = None
) -> list[Path]:
    """Draw the curves; return the SVG files, each of which has its numbers in a CSV beside it."""

    def by_basis(curve: str) -> dict[str, list[Line]]:
        pairs = ((answer.basis, answer.schedule) for answer in schedules)
        return {name: [(s.candidates.tolist(), getattr(s, curve).tolist())] for name, s in pairs}

    values = np.concatenate([answer.schedule.convergence for answer in schedules])
    with np.errstate(over="ignore"):  # a diverging bound may overflow
        convergence = draw_lines(
            folder,
            "convergence",
            "Bound h(T, λ) on the personal models' squared distance",
            "h(T, λ)",
            by_basis("convergence"),
            xlabel="rounds T",
            log=bool(values.min() > 0 and values.max() > 20 * values.min()),
        )
    if fairness is None:
        return [convergence]
    title, weights = "Fairest λ under the noise that T rounds need", by_basis("global_weights")
    fairest = draw_lines(folder, "global_weight", title, "λ*(T)", weights, xlabel="rounds T")
    grid = np.linspace(0, LARGEST_WEIGHT, 201)
    spread: dict[str, list[Line]] = {}
    for answer in schedules:
        variance = answer.noise_stddev**2
        values = fairness.unfairness(grid, upload_variance=variance, basis=answer.basis)
        label = f"{answer.basis}, T = {answer.schedule.rounds}"
        spread[label] = [(grid.tolist(), values.tolist())]
    title = "Variance over clients of ‖u* − v‖²"
    drawn = draw_lines(folder, "fairness", title, "R(λ)", spread, xlabel="λ")
    return [convergence, fairest, drawn]


@dataclass(frozen=True)
class FairnessRow:
    """R(λ) under the noise of one basis: by both formulas, and measured in drawn federations."""

    noise: Basis
    noise_stddev: float
    global_weight: float
    published: float
    provable: float
    drawn: float
    standard_error: float


def fairness_rows(
    schedules: Sequence[CalibratedSchedule], fairness: LinearFairness, worlds: int
) -> list[FairnessRow]:
    """Return R for λ = 0 (local), λ*, 1 and 2 (shared), under the noise of each basis.

    Raises
    ------
    InvalidValue
        The problem has fewer examples than dimensions, so no such federation can be drawn.
    """
    rows = []
    for answer in schedules:
        weights = sorted({0.0, answer.schedule.global_weight, LARGEST_WEIGHT / 2, LARGEST_WEIGHT})
        drawn, errors = simulated_unfairness(
            fairness,
            weights,
            upload_stddev=answer.noise_stddev,
            num_federations=worlds,
            rng=np.random.default_rng(0),
        )
        variance = answer.noise_stddev**2
        published = fairness.unfairness(weights, upload_variance=variance, basis="published")
        provable = fairness.unfairness(weights, upload_variance=variance)
        numbers = np.column_stack([weights, published, provable, drawn, errors]).tolist()
        rows += [FairnessRow(answer.basis, answer.noise_stddev, *row) for row in numbers]
    return rows
