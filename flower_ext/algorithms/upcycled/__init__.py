"""Upcycled-FL: in every even round the server reuses earlier models and contacts no client.

Source: Yin, Tan, Zhang, Khalili, Liu, "Federated Learning with Reduced Information Leakage and
Computation" (TMLR 2024).
"""

from flower_ext.algorithms.upcycled.wrapper import Coefficient, Decaying, Upcycled, proximal_ratio

__all__ = ["Coefficient", "Decaying", "Upcycled", "proximal_ratio"]
