"""DP-Ditto: the method, and the pilot run that measures constants for its planner.

Source: Zhao, Cui, Li, Ni, Hossain, Sheng, Tao, Zhang, "Convergence-Privacy-Fairness Trade-Off in
Personalized Federated Learning". The formulas of the planner are in `flower_ext.planning`.
"""

from flower_ext.algorithms.ditto.dp_ditto import DPDitto
from flower_ext.algorithms.ditto.pilot import pilot_run

__all__ = ["DPDitto", "pilot_run"]
