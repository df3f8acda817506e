"""DP-Ditto's planner: the number of rounds and the weight of the global model for a budget.

Import names from the modules of this package: ``convergence``, ``fairness``, ``search``.
"""
