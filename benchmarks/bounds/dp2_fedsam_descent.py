"""Convergence of DP²-FedSAM: Theorem 1, as its appendix derives it and as it can be proved.

Source: Zhang, Guo, Gong, DP²-FedSAM, Section 4.1 and Appendix A. Both bounds are on the left side
of Eq. 21, (1/T) Σ_t (E‖∇_φ F‖²/L_φ + (r/L_h) mean_i E‖∇_h F_i‖²); the published one weights its
first part by ᾱ_t ≤ 1.

====================  =====================================================
paper                 here
====================  =====================================================
L_φ, L_h, χ           ``extractor_smoothness``, ``head_smoothness``, ``coupling``
G, σ_φ, σ_h           ``gradient_bound``, ``extractor_stddev``, ``head_stddev``
η_φ, τ_φ, η_h, τ_h    ``extractor_rate`` and ``_steps``, ``head_rate`` and ``_steps``
r, N, d₁              ``sampling_rate``, ``num_clients``, ``dimension``
q, σ, C               ``radius``, ``noise_multiplier``, ``clipping_norm``
ᾱ, α̃                  ``mean_factor``, ``factor_spread``
====================  =====================================================

The published derivation drops the bias of clipping. It also gives the error of SAM a factor η_φ,
although that error is of the order q² for any η_φ (`docs/proved/dp2-fedsam.md` lists the errors).
"""

import math
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import (
    Checked,
    Count,
    Fraction,
    NotNegative,
    Positive,
    require_at_least_one,
    require_not_negative,
)
from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class PersonalDescent(Checked):
    """Constants of the losses and of a run of DP²-FedSAM.

    Rounds sample exactly rN clients. Steps are plain gradient steps, without momentum.

    Parameters
    ----------
    extractor_smoothness, head_smoothness : float
        Lipschitz constants of ∇_φ F_i in φ and of ∇_h F_i in h. With a ``radius``, the loss of each
        batch must be as smooth as F_i.
    coupling : float
        χ: √(L_φ L_h) χ bounds the Lipschitz constants of ∇_φ F_i in h and of ∇_h F_i in φ.
    gradient_bound : float
        G ≥ ‖∇F_i‖. The provable bound needs E‖∇_φ F_i‖² ≤ G² along the run only.
    extractor_stddev, head_stddev : float
        σ_φ² and σ_h² bound the variance of stochastic gradients.
    initial_gap : float
        F(φ⁰, H⁰) − F*.
    """

    extractor_smoothness: Positive
    head_smoothness: Positive
    gradient_bound: Positive
    extractor_rate: Positive
    head_rate: Positive
    initial_gap: NotNegative
    dimension: Count
    num_clients: Count
    clipping_norm: Positive
    sampling_rate: Fraction = 1.0
    extractor_steps: Count = 1
    head_steps: Count = 1
    coupling: NotNegative = 0.0
    extractor_stddev: NotNegative = 0.0
    head_stddev: NotNegative = 0.0
    radius: NotNegative = 0.0
    noise_multiplier: NotNegative = 0.0

    @property
    def paces(self) -> tuple[float, float]:
        """η_φ τ_φ L_φ and η_h τ_h L_h."""
        extractor = self.extractor_rate * self.extractor_steps * self.extractor_smoothness
        return extractor, self.head_rate * self.head_steps * self.head_smoothness

    @property
    def noise_variance(self) -> float:
        """Variance of one coordinate of a round's noise: σ²C²/(rN)²."""
        clients = self.sampling_rate * self.num_clients
        return (self.noise_multiplier * self.clipping_norm / clients) ** 2


def dp2_fedsam_published_bound(
    problem: PersonalDescent, *, rounds: int, mean_factor: float = 1.0, factor_spread: float = 0.0
) -> float:
    """Return the last inequality of Appendix A.3, from which Eq. 21 takes its orders.

    The inequality is divided by the smaller of η_φ τ_φ L_φ/8 and η_h τ_h L_h/16. Its noise term has
    d₁² where d₁ would be right. If rates fall as 1/√T, the noise term grows as √T for a fixed σ,
    and as T^(3/2) for Theorem 2's σ² ∝ T.

    Parameters
    ----------
    mean_factor, factor_spread : float
        ᾱ and α̃: mean over rounds and clients of min(1, C/‖Δ_i‖), and of its distance from ᾱ_t.
    """
    require_at_least_one("rounds", rounds)
    p, L, M = problem, problem.extractor_smoothness, problem.head_smoothness
    e, tau, h, steps = p.extractor_rate, p.extractor_steps, p.head_rate, p.head_steps
    chi2, variance, r = p.coupling**2, p.head_stddev**2, p.sampling_rate
    total = (
        p.initial_gap / rounds
        + (36 * e**4 * tau**2 * L**2 * mean_factor + 3 * e**2 * tau * L) * p.gradient_bound**2
        + (factor_spread * e * tau * L**2 + L**2 * e**2 * tau * mean_factor + 3 * L**3 * e**2 * tau)
        * p.radius**2
        + (
            L**2 * e**2 * tau * mean_factor * (72 * tau * e**2 + 18 * e**2 * tau**2)
            + 3 * L * e**2 * tau
        )
        * p.extractor_stddev**2
        + 4 * chi2 * h**2 * steps**2 * M * variance * (1 - r)
        + L * p.noise_variance * p.dimension**2
        + h**2 * steps**2 * M * variance * r / 2
        + 4 * h**3 * M * steps**2 * (steps - 1) * variance * r
        + mean_factor * e * tau * h**2 * steps**2 * variance * chi2 * L * M
    )
    extractor, head = p.paces
    return total / min(extractor / 8, head / 16)


def dp2_fedsam_provable_bound(
    problem: PersonalDescent, *, rounds: int, clipped_length: float = 0.0
) -> float:
    """Return a provable bound. It bounds more than the published one: its left side has ᾱ_t = 1.

    Let Δ_i = −η_φ Σ_s g_{i,s} be the update before clipping. Let Ȟ be the heads after training if
    every client trained its own, and v = ∇_φ F(φ, Ȟ). Let G' = G + L_φ q bound a gradient at a
    perturbed model.

    1. Clipping shortens an update longer than C by ‖Δ_i‖ − C. Let κ² be the mean square of this
       amount over clients. Clipping then contributes to ⟨v, φ⁺ − φ⟩ at most
       (η_φ τ_φ/4)‖v‖² + κ²/(η_φ τ_φ).
    2. After s steps a local model is at most e_s = η_φ (s G' + √s σ_φ) away from its start, in root
       mean square. The mean gradient u of each step satisfies −⟨v, u⟩ ≤ −½‖v‖² + ½‖v − u‖² and
       ‖v − u‖ ≤ L_φ (e_s + q).
    3. E‖φ⁺ − φ‖² ≤ min(C, η_φ (τ_φ G' + √τ_φ σ_φ))² + d₁ σ²C²/(rN)².
    4. For η_h τ_h L_h ≤ 1/8, τ_h gradient steps on the head lower F_i by at least
       (η_h τ_h/4)‖∇_h F_i‖² − η_h² τ_h L_h σ_h² (½ + η_h τ_h L_h). They move the head by at most
       4.2 η_h² τ_h² ‖∇_h F_i‖² + 2.1 η_h² τ_h σ_h², in mean square.
    5. Only a share r of the clients train their heads, so the descent of step 4 enters the mean
       over clients with the factor r/4. The proof also replaces Ȟ by Hᵗ in v, and Hᵗ⁺¹ by Ȟ in
       Lemma 5. By step 4, this lowers r/4 by χ² η_h τ_h L_h (2.1 (1 − r) + 1.05 η_φ τ_φ L_φ). If
       r/4 shrinks by at most r/8, a round lowers F by
       (η_φ τ_φ/8)‖∇_φ F‖² + (r η_h τ_h/8) mean_i ‖∇_h F_i‖², less the error terms of steps 1 to 4.

    Parameters
    ----------
    clipped_length : float
        Root mean square, over rounds and clients, of the length (‖Δ_i‖ − C)₊ that clipping cuts off
        an update. Clients that were not drawn count with the update that they would have sent.

    Raises
    ------
    ValueError
        A learning rate is too large: η_h τ_h L_h ≤ 1/8 and
        χ² η_h τ_h L_h (2.1 (1 − r) + 1.05 η_φ τ_φ L_φ) ≤ r/8 are needed.
    """
    require_at_least_one("rounds", rounds)
    require_not_negative("clipped_length", clipped_length)
    p, (pace, head), r = problem, problem.paces, problem.sampling_rate
    crossing = p.coupling**2 * head * (2.1 * (1 - r) + 1.05 * pace)
    if head > 1 / 8 or crossing > r / 8:
        raise InvalidValue(
            f"head_rate={p.head_rate!r}: expected η_h τ_h L_h <= 1/8 (it is {head:.4g}), and "
            f"χ² η_h τ_h L_h (2.1 (1 − r) + 1.05 η_φ τ_φ L_φ) <= r/8 (it is {crossing:.4g}); lower "
            "the rate"
        )
    L, e, tau = p.extractor_smoothness, p.extractor_rate, p.extractor_steps
    steep = p.gradient_bound + L * p.radius  # of a gradient at the perturbed model
    done = np.arange(tau)
    drift = e * (done * steep + np.sqrt(done) * p.extractor_stddev)
    error = L**2 * float(((drift + p.radius) ** 2).sum())
    length = min(p.clipping_norm, e * (tau * steep + math.sqrt(tau) * p.extractor_stddev))
    noise_of_heads = p.head_rate * p.head_stddev**2 * head
    total = (
        p.initial_gap / rounds
        + e / 2 * error
        + clipped_length**2 / (e * tau)
        + L * (length**2 + p.noise_variance * p.dimension)
        + noise_of_heads * r * (1 / 2 + head)
        + noise_of_heads * p.coupling**2 * (1.05 * (1 - r) + 0.525 * pace)
    )
    return 8 * total / min(pace, head)
