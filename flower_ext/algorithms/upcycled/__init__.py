"""Upcycled-FL: every even round reuses earlier models and contacts nobody.

Source: Yin, Tan, Zhang, Khalili, Liu, "Federated Learning with Reduced Information Leakage and
Computation" (TMLR 2024).
"""

from flower_ext.algorithms.upcycled.coefficients import (
    Constant,
    Decaying,
    HalfLambda,
    ProximalRatio,
    Schedule,
)
from flower_ext.algorithms.upcycled.gradient_norm import (
    ConvergenceConstants,
    convergence_constants,
    gradient_norm_bound,
)
from flower_ext.algorithms.upcycled.wrapper import Traffic, Upcycled

__all__ = [
    "Constant",
    "ConvergenceConstants",
    "Decaying",
    "HalfLambda",
    "ProximalRatio",
    "Schedule",
    "Traffic",
    "Upcycled",
    "convergence_constants",
    "gradient_norm_bound",
]
