"""The ε of all panels of Figures 4 to 7, which nothing needs to be trained for."""

from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import median

from benchmarks.report.rows import store_rows
from benchmarks.runs import Experiment, app_module
from benchmarks.uldp.experiment import DELTA, METHODS, NOISE_MULTIPLIER, Problem
from flower_ext.privacy import DpSgd, epsilon_text
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees
from flower_ext.privacy.theorems.uldp_theorem import uldp_closed_form
from flower_ext.runs.page import table

LABELS = tuple(label for label in METHODS if label != "DEFAULT")


def budgets(experiment: Experiment, figure: int, panels: list[Problem]) -> str:
    """Return published and provable ε at the paper's length, under one seed; keep them."""
    rows = [
        {"panel": panel.name, "method": label, **budget_of(experiment, panel, label)}
        for panel in panels
        for label in LABELS
    ]
    header, cells = list(rows[0]), [list(row.values()) for row in rows]
    store_rows(f"uldp-fl-budgets-{figure}", header, cells, folder=experiment.folder)
    return table(header, cells)


def budget_of(experiment: Experiment, panel: Problem, label: str) -> dict[str, str]:
    """Return group size, and ε published and provable, of a method in a panel."""
    settings = panel.preset(label)
    rounds, method = int(settings["rounds"]), str(METHODS[label]["method"])
    if method != "uldp-group":
        shares = 2 if method == "uldp-naive" else 1
        closed = uldp_closed_form(noise_multiplier=NOISE_MULTIPLIER, rounds=rounds, delta=DELTA)
        loss = gaussian_loss(NOISE_MULTIPLIER / shares, releases=rounds, delta=DELTA)
        return _cells("", closed, loss.epsilon)
    rate = float(settings["record-sampling-rate"])
    size = group_size(experiment, panel, str(METHODS[label]["group-size"]))
    steps = max(1, round(int(settings["local-epochs"]) / rate)) * rounds
    silo = DpSgd(noise_multiplier=NOISE_MULTIPLIER, sampling_rate=rate, steps=steps)
    published, provable = uldp_group_guarantees(silo, group_size=size, delta=DELTA)
    return _cells(str(size), published.epsilon, provable.epsilon)


def group_size(experiment: Experiment, panel: Problem, size: str) -> int:
    """Return k: a number, or the largest or median number of a user's records under seed 1."""
    if size.isdecimal():
        return int(size)
    counts = list(records_of(experiment, panel).values())
    return max(counts) if size == "max" else int(median(counts))


def records_of(experiment: Experiment, panel: Problem) -> Counter[int]:
    """Return the number of training records of each user, in all silos together."""
    silos = app_module("uldp-fl", "silos").load_silos(
        panel.dataset,
        Path(str(experiment.base["data-folder"])),
        num_users=panel.users,
        num_silos=panel.silos,
        distribution=panel.distribution,
        labels_per_user=panel.labels_per_user or None,
        seed=1,
    )
    return Counter(chain.from_iterable(silo.owners.tolist() for silo in silos))


def _cells(size: str, published: float, provable: float) -> dict[str, str]:
    return {
        "group size": size,
        "published": epsilon_text(published),
        "provable": epsilon_text(provable),
    }
