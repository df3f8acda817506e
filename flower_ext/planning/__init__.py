"""DP-Ditto's planner: the number of rounds and the share of personalisation for a budget."""

from flower_ext.planning.convergence import ConvergenceBound, DittoProblem, convergence_bound
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.linear_federation import LinearFederation
from flower_ext.planning.loss_constants import PilotEstimates, estimate_problem
from flower_ext.planning.search import (
    EmpiricalSchedule,
    Outcome,
    Schedule,
    alternating_search,
    best_rounds,
    joint_search,
)

__all__ = [
    "ConvergenceBound",
    "DittoProblem",
    "EmpiricalSchedule",
    "LinearFairness",
    "LinearFederation",
    "Outcome",
    "PilotEstimates",
    "Schedule",
    "alternating_search",
    "best_rounds",
    "convergence_bound",
    "estimate_problem",
    "joint_search",
]
