"""Upcycled-FL: every even round reuses earlier models and contacts nobody.

Source: Yin, Tan, Zhang, Khalili, Liu, "Federated Learning with Reduced Information Leakage and
Computation" (TMLR 2024).
"""

from typing import TYPE_CHECKING

from flower_ext._former import former_names
from flower_ext.algorithms.upcycled.coefficients import (
    Coefficient,
    Constant,
    Decaying,
    HalfLambda,
    ProximalRatio,
    coefficient_of,
)
from flower_ext.algorithms.upcycled.gradient_norm import (
    ConvergenceConstants,
    convergence_constants,
    gradient_norm_bound,
)
from flower_ext.algorithms.upcycled.wrapper import Traffic, Upcycled

__all__ = [
    "Coefficient",
    "Constant",
    "ConvergenceConstants",
    "Decaying",
    "HalfLambda",
    "ProximalRatio",
    "Traffic",
    "Upcycled",
    "coefficient_of",
    "convergence_constants",
    "gradient_norm_bound",
]

if not TYPE_CHECKING:  # so that type checkers refuse it
    __getattr__ = former_names(__name__, {"Schedule": "flower_ext.algorithms.upcycled.Coefficient"})
