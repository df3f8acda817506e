"""DP-Ditto's planner: the number of rounds and the share of personalisation for a budget."""

from flower_ext.planning.convergence import ConvergenceBound, DittoProblem, convergence_bound
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.search import (
    EmpiricalSchedule,
    Outcome,
    Schedule,
    alternating_search,
    best_schedule,
)

__all__ = [
    "ConvergenceBound",
    "DittoProblem",
    "EmpiricalSchedule",
    "LinearFairness",
    "Outcome",
    "Schedule",
    "alternating_search",
    "best_schedule",
    "convergence_bound",
]
