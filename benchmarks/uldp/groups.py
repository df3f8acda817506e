"""Figure 2: ε of record-level DP for a group of k records, by four bounds."""

from collections.abc import Callable

from benchmarks.runs import Experiment
from benchmarks.uldp.experiment import DELTA, NOISE_MULTIPLIER, Scale
from flower_ext.privacy import DpSgd, epsilon_text
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees
from flower_ext.runs.page import table
from flower_ext_planner.uldp_lemmas import group_loss_by_conversion, group_loss_by_renyi

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TRAINING = DpSgd(noise_multiplier=NOISE_MULTIPLIER, sampling_rate=0.01, steps=100_000)
PAPER = {1: 2.85, 32: 2100, 64: 11400}


def group_conversion(experiment: Experiment, scale: Scale) -> str:
    """Return a table of ε of groups of k records at the paper's noise, rate and steps."""
    bounds = {
        "as published": [_published(size) for size in SIZES],
        "Lemma 9, k rounded up": [_epsilon(group_loss_by_renyi, size) for size in SIZES],
        "Lemma 8": [_epsilon(group_loss_by_conversion, size) for size in SIZES],
        "tight": [_epsilon(group_loss, size) for size in SIZES],
    }
    sizes = [float(size) for size in SIZES]
    title = "ε of a group of k records"
    lines = {name: [(sizes, values)] for name, values in bounds.items()}
    figure = experiment.draw("figure-2", title, "ε", lines, xlabel="k", log=True)
    rows = [
        (
            size,
            *(epsilon_text(values[at]) for values in bounds.values()),
            f"{bounds['as published'][at] / bounds['tight'][at]:.1f}",
            f"{PAPER[size]:g}" if size in PAPER else "",
        )
        for at, size in enumerate(SIZES)
    ]
    header = ("k", *bounds, "published / tight", "the paper's text")
    notes = (
        f"σ = {TRAINING.noise_multiplier:g}, rate {TRAINING.sampling_rate:g}, "
        f"{TRAINING.steps:,} steps, δ = {DELTA:g}. As published: Lemma 9 at the largest power of "
        "two that is not above k, so no guarantee for the others. Tight: the mixture of Gaussians "
        "that k records make, by PLD."
    )
    return "\n\n".join(["# Figure 2: group privacy", table(header, rows), notes, figure])


def _published(size: int) -> float:
    published, _ = uldp_group_guarantees(TRAINING, group_size=size, delta=DELTA)
    return published.epsilon


def _epsilon(bound: Callable[..., PrivacyLoss], size: int) -> float:
    return bound(TRAINING, group_size=size, delta=DELTA).epsilon
