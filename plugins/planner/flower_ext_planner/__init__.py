"""Plan a run: its noise, ε, rounds and sampling, and the weight of DP-Ditto's global model.

Import names from the modules of this package: ``convergence``, ``fairness``, ``rounds_and_rates``,
``search``, ``uldp_lemmas``.
"""
