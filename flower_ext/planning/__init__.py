"""How many rounds to run and how much to personalise under a privacy budget. NumPy only."""

from flower_ext.planning.convergence import (
    Coefficients,
    ConvergenceBound,
    DittoProblem,
    convergence_bound,
)
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.linear_world import LinearWorld
from flower_ext.planning.loss_constants import PilotEstimates, estimate_problem
from flower_ext.planning.search import (
    EmpiricalPlan,
    Outcome,
    TrainingPlan,
    alternating_search,
    best_rounds,
    joint_search,
)

__all__ = [
    "Coefficients",
    "ConvergenceBound",
    "DittoProblem",
    "EmpiricalPlan",
    "LinearFairness",
    "LinearWorld",
    "Outcome",
    "PilotEstimates",
    "TrainingPlan",
    "alternating_search",
    "best_rounds",
    "convergence_bound",
    "estimate_problem",
    "joint_search",
]
