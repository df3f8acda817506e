"""The bound of Theorem 5.6 of Upcycled-FL."""

from collections.abc import Sequence

from flower_ext.planning.upcycled_descent import ConvergenceConstants


def gradient_norm_bound(
    constants: Sequence[ConvergenceConstants],
    *,
    initial_gap: float,
    gradient_norms: Sequence[float],
    steps: Sequence[float],
) -> float:
    """Return the bound of Theorem 5.6 on min_m E‖∇f(w̄²ᵐ⁻¹)‖² after M odd rounds.

    The bound holds on the basis, published or provable, of ``constants``.

    Parameters
    ----------
    constants : Sequence[ConvergenceConstants]
        Constants of each of the M rounds; all have the same C₁.
    initial_gap : float
        f(w̄⁰) − f(w*).
    gradient_norms : Sequence[float]
        ‖∇f(w̄²ᵐ⁻¹)‖ of each round, or an upper bound d (Assumption 5.7).
    steps : Sequence[float]
        ‖w̄²ᵐ⁻¹ − w̄²ᵐ⁻²‖ of each round, or an upper bound h (Assumption 5.7).
    """
    M, c1 = len(constants), constants[0].c1
    drift = sum(
        one.c2 * norm * step + one.c3 * step**2
        for one, norm, step in zip(constants, gradient_norms, steps, strict=True)
    )
    return (initial_gap + drift) / (M * c1)
