"""Upcycled-FL: in every even round the server reuses earlier models and contacts no client.

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

if not TYPE_CHECKING:  # type checkers must not accept the former name
    __getattr__ = former_names(__name__, {"Schedule": "flower_ext.algorithms.upcycled.Coefficient"})
