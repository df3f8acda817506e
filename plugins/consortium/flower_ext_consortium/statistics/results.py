"""The results of a run that released statistics: a table, figures and a page in its directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_ext.files import write_rows, write_whole
from flower_ext.privacy import PrivacyPlan, seeded_generator
from flower_ext.runs import RunDirectory, write_report
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.figures import COLOURS, canvas, save_figure
from flower_ext.runs.page import write_page
from flower_ext_consortium.statistics.kinds import Histogram, SurvivalCurve, Variance
from flower_ext_consortium.statistics.release import estimates
from flower_ext_consortium.statistics.statistic import Estimate, JointStatistics, Statistic

if TYPE_CHECKING:
    from flower_ext.federation import Method

HEADER = ("statistic", "name", "estimate", "standard error", "lower", "upper")
TABLE, PAGE, STANDARDISE = "statistics.csv", "statistics.html", "standardise.toml"
"""Files in a run directory: the estimates, the page, and a setting ``standardise`` for apps.

The last file is written if the statistics have variances.
"""


class StatisticsFiles(Callback):
    """Write the estimates when the run ends: ``statistics.csv``, figures and ``statistics.html``.

    Parameters
    ----------
    joint : JointStatistics
    method : Method
    plan : PrivacyPlan
        The plan of the run.
    """

    def __init__(self, joint: JointStatistics, method: Method, plan: PrivacyPlan) -> None:
        self._joint, self._method, self._plan = joint, method, plan

    def end(self, run: RunDirectory) -> None:
        """Write the files of a run whose round was not discarded."""
        if run.status != "completed" or any(row.get("discarded") for row in run.metrics()):
            return
        from safetensors.numpy import load_file

        results = estimates(
            self._joint,
            load_file(run.path / "model.safetensors"),
            method=self._method,
            plan=self._plan,
            rng=seeded_generator(0, "standard errors"),  # protects nobody, so a seed is safe
        )
        rows = [
            (statistic.title, each.name, each.value, each.standard_error, each.lower, each.upper)
            for statistic, released in results.items()
            for each in released
        ]
        write_rows(run.path / TABLE, HEADER, rows)
        scales = []
        for statistic, released in results.items():
            if isinstance(statistic, Variance) and released[-1].value > 0:
                _, mean, variance = released
                deviation = math.sqrt(variance.value)
                scales.append(f"{statistic.column} {mean.value:.6g} {deviation:.6g}")
        if scales:
            setting = f'[settings]\nstandardise = "{"; ".join(scales)}"\n'
            content = f'title = "Centres and deviations"\n\n{setting}'
            write_whole(run.path / STANDARDISE, content.encode())
        figures = {}
        for number, (statistic, released) in enumerate(results.items(), 1):
            is_bars = isinstance(statistic, Histogram) and len(statistic.axes) == 1
            if is_bars or isinstance(statistic, SurvivalCurve):
                name = f"statistic-{number}"
                _draw(run.path / "figures", name, statistic, released)
                figures[f"{name}.svg"] = statistic.title
        write_page(
            run.path,
            "statistics",
            title="Statistics",
            results={
                statistic.title: [(each.name, *estimate_texts(each)) for each in released]
                for statistic, released in results.items()
            },
            figures=figures,
            guarantees=[each for each in run.guarantees() if each.basis == "provable"],
        )
        write_report(run)  # again, now with the statistics


def estimate_texts(estimate: Estimate) -> tuple[str, str, str]:
    """Return the estimate, its standard error and its interval as text.

    The numbers have as many digits as the noise permits.
    """
    if math.isnan(estimate.value):
        return "too much noise", "–", "–"
    error = estimate.standard_error
    # Two digits of the error: further digits would show noise only.
    digits = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 3
    value, low, high = (
        f"{round(number, digits) + 0.0:,.{digits}f}"  # adding 0.0 turns -0.0 into 0.0
        for number in (estimate.value, estimate.lower, estimate.upper)
    )
    return value, f"{error:,.{digits}f}", f"{low} to {high}"


def _draw(folder: Path, name: str, statistic: Statistic, released: list[Estimate]) -> None:
    """Draw a histogram as bars, or a survival curve as steps, with 95 % intervals."""
    rows = [(each.name, each.value, each.lower, each.upper) for each in released]
    names, *numbers = zip(*rows, strict=True)
    is_curve = isinstance(statistic, SurvivalCurve)
    axis = "share of people" if is_curve else "people"
    figure, axes = canvas(statistic.title, statistic.columns[0], axis)
    if isinstance(statistic, SurvivalCurve):
        times = statistic.times.edges
        values, lower, upper = (
            np.insert(np.clip(np.nan_to_num(shares), 0, 1), 0, 1.0) for shares in numbers
        )
        axes.fill_between(times, lower, upper, step="post", alpha=0.25, color=COLOURS[0])
        axes.step(times, values, where="post", color=COLOURS[0])
        axes.set_ylim(0, 1.02)
    else:
        places, (values, lower, upper) = range(len(released)), np.array(numbers)
        axes.bar(places, values, color=COLOURS[0])
        axes.errorbar(places, values, (upper - lower) / 2, fmt="none", ecolor="black")
        axes.set_xticks(list(places), names, rotation=30, ha="right")
        axes.tick_params(axis="x", labelsize=7)
        figure.set_layout_engine("constrained")  # makes room for the names of bins
    save_figure(figure, folder, name, ("name", "estimate", "lower", "upper"), rows)
