"""The data sets of Uldp-FL's figures, and the panels that the paper shows of each."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.uldp.experiment import Problem

CREDITCARD = Problem(
    dataset="creditcard",
    metric="accuracy_pooled",
    records=23_600,
    silos=5,
    users=1000,
    rounds=15,
    search_rounds=15,
    epochs=2,
)
MNIST = Problem(
    dataset="mnist",
    metric="accuracy_pooled",
    records=60_000,
    silos=5,
    users=100,
    rounds=6,
    search_rounds=2,
    epochs=1,
)
HEART_DISEASE = Problem(
    dataset="heart-disease",
    metric="accuracy_pooled",
    records=486,
    silos=4,
    users=50,
    learning_rates=(0.01, 0.05, 0.2, 0.8),
    search_seeds=2,
    rounds=15,
    search_rounds=15,
    epochs=5,
)
TCGA_BRCA = replace(
    HEART_DISEASE,
    dataset="tcga-brca",
    metric="concordance_mean",
    records=866,
    silos=6,
    learning_rates=(0.001, 0.003),
)
TCGA_BRCA_SCALED = replace(TCGA_BRCA, dataset="tcga-brca-scaled", learning_rates=(0.05, 0.2))
"""Age in decades: see ``tcga_brca`` in the app's ``tables.py``."""
PROBLEMS = {4: (CREDITCARD,), 5: (MNIST,), 6: (HEART_DISEASE,), 7: (TCGA_BRCA, TCGA_BRCA_SCALED)}
"""The problems of each of the paper's figures."""


def all_panels(problems: Sequence[Problem]) -> list[Problem]:
    """Return the paper's panels of a figure."""
    return [panel for problem in problems for panel in panels_of(problem)]


def panels_of(problem: Problem) -> list[Problem]:
    """Return the paper's panels of a data set, by number of users, distribution and labels."""
    users = {"creditcard": (100, 1000), "mnist": (100, 10_000)}.get(problem.dataset, (50, 200))
    labels = (0, 2) if problem.dataset == "mnist" else (0,)
    return [
        replace(problem, users=count, distribution=distribution, labels_per_user=most)
        for count in users
        for distribution in ("uniform", "zipf")
        for most in labels
        if distribution == "zipf" or most == 0
    ]
