"""The curves that ``flower-ext plan`` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flower_ext.planning import LinearFairness
from flower_ext.planning.answers import Answer
from flower_ext.planning.convergence import LARGEST_WEIGHT
from flower_ext.runs.figures import Line, draw_lines

CURVE_ROWS = 12
"""How many numbers of rounds the printed table names."""


def curve_rows(found: Sequence[Answer]) -> list[int]:
    """Numbers of rounds worth printing: spread evenly in their logarithm, and each T*."""
    last = int(found[0].schedule.candidates[-1])
    spread = np.unique(np.geomspace(1, last, CURVE_ROWS).round().astype(int)).tolist()
    return sorted(
        {*spread, *(answer.schedule.rounds for answer in found if answer.schedule.rounds)}
    )


def draw_plan(
    found: Sequence[Answer], folder: Path, *, fairness: LinearFairness | None = None
) -> list[Path]:
    """The curves, each an SVG with its numbers as CSV beside it."""
    bounds: dict[str, Line] = {
        answer.basis: (answer.schedule.candidates.tolist(), answer.schedule.convergence.tolist())
        for answer in found
    }
    values = np.concatenate([answer.schedule.convergence for answer in found])
    with np.errstate(over="ignore"):  # the axis ends above what a diverging bound reaches
        convergence = draw_lines(
            folder,
            "convergence",
            "Bound h(T, λ) on the personal models' squared distance",
            "h(T, λ)",
            bounds,
            xlabel="planned rounds T",
            log=bool(values.min() > 0 and values.max() > 20 * values.min()),
        )
    drawn = [convergence]
    if fairness is None:
        return drawn
    weights: dict[str, Line] = {
        answer.basis: (answer.schedule.candidates.tolist(), answer.schedule.global_weights.tolist())
        for answer in found
    }
    grid = np.linspace(0, LARGEST_WEIGHT, 201)
    unfairness: dict[str, Line] = {}
    for answer in found:
        spread = fairness.unfairness(
            grid, upload_variance=answer.noise_stddev**2, basis=answer.basis
        )
        unfairness[f"{answer.basis}, T = {answer.schedule.rounds}"] = (
            grid.tolist(),
            spread.tolist(),
        )
    return [
        *drawn,
        draw_lines(
            folder,
            "global_weight",
            "Fairest λ under the noise that T rounds need",
            "λ*(T)",
            weights,
            xlabel="planned rounds T",
        ),
        draw_lines(
            folder,
            "fairness",
            "Variance over clients of ‖u* − v‖²",
            "R(λ)",
            unfairness,
            xlabel="λ",
        ),
    ]
