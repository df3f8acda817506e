"""The curves that ``flower-ext plan`` prints and draws, and what it checks on drawn federations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flower_ext.planning import LinearFairness
from flower_ext.planning.answers import Answer
from flower_ext.planning.convergence import LARGEST_WEIGHT
from flower_ext.planning.linear_world import drawn_unfairness
from flower_ext.privacy.guarantee import Basis
from flower_ext.runs.figures import Line, draw_lines

CURVE_ROWS = 12
"""Largest count of rows, each a number of rounds, in the printed table."""


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


@dataclass(frozen=True, kw_only=True)
class FairnessRow:
    """R at one λ under the noise of one basis: by both formulas, and in drawn federations."""

    noise: Basis
    noise_stddev: float
    global_weight: float
    published: float
    provable: float
    drawn: float
    standard_error: float


def fairness_rows(
    found: Sequence[Answer], fairness: LinearFairness, worlds: int
) -> list[FairnessRow]:
    """Local models, λ*, models half way and the shared one, under the noise of each basis.

    Raises
    ------
    ValueError
        Fewer examples than dimensions: no such federation can be drawn.
    """
    rows = []
    for answer in found:
        weights = sorted({0.0, answer.schedule.global_weight, LARGEST_WEIGHT / 2, LARGEST_WEIGHT})
        drawn, errors = drawn_unfairness(
            fairness,
            weights,
            upload_stddev=answer.noise_stddev,
            worlds=worlds,
            rng=np.random.default_rng(0),
        )
        variance = answer.noise_stddev**2
        for weight, mean, error in zip(weights, drawn, errors, strict=True):
            rows.append(
                FairnessRow(
                    noise=answer.basis,
                    noise_stddev=answer.noise_stddev,
                    global_weight=weight,
                    published=float(
                        fairness.unfairness(weight, upload_variance=variance, basis="published")
                    ),
                    provable=float(fairness.unfairness(weight, upload_variance=variance)),
                    drawn=float(mean),
                    standard_error=float(error),
                )
            )
    return rows
