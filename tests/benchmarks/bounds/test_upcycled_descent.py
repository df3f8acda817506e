"""Lemma 5.5's constants and Theorem 5.6's bound, compared with the paper and with real descents."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedProx
from torch import nn

from benchmarks.bounds.upcycled_descent import (
    ConvergenceConstants,
    convergence_constants,
)
from flower_ext.algorithms import Hosted, Upcycled
from flower_ext.algorithms.upcycled import (
    Decaying,
    proximal_ratio,
)
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining, Task
from tests.support.upcycled_descent import USUAL, Quadratics, constants, random_quadratics

ROOT = Path(__file__).parents[3]


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


def lemma_b1(L, B, mu, rho, c):
    """Return Ĉ₁, Ĉ₂, Ĉ₃ of Lemma B.1, as printed."""
    return (
        1 / mu - L * B / (mu * mu * rho) - L * B * B / (2 * rho * rho),
        (L * L / (mu * mu * rho) + (L + mu) / (mu * mu) + L * (L + rho) * B / (rho * rho)) * c,
        L * (L + rho) * (L + rho) / (2 * rho * rho) * c * c,
    )


def lemma_b2(L, B, rho, K, c):
    """Return C̃₁, C̃₂, C̃₃ of Lemma B.2, as printed."""
    root = math.sqrt(2 / K)
    return (
        2 * B * B / (K * rho * rho) + (2 * L * B + rho) / rho * root * B / rho,
        (
            4 * L * B / (K * rho * rho)
            + (2 * L * B + rho) / rho * root * L / rho
            + 2 * L * (L + rho) / rho * root * B / rho
        )
        * c,
        (2 / K * L * L / (rho * rho) + 2 * L * (L + rho) / rho * root * L / rho) * c * c,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_constants_are_those_of_lemmas_b1_and_b2_put_together(seed):
    rng = np.random.default_rng(seed)
    L, B, mu, rho = np.exp(rng.uniform(-2, 2, 4))
    K, c = int(rng.integers(1, 100)), rng.uniform()
    ours = convergence_constants(
        smoothness=L,
        dissimilarity=B,
        proximal_weight=mu,
        strong_convexity=rho,
        cohort_size=K,
        coefficient=c,
        basis="published",
    )
    (a1, a2, a3), (b1, b2, b3) = lemma_b1(L, B, mu, rho, c), lemma_b2(L, B, rho, K, c)
    assert ours.c1 == pytest.approx(a1 - b1, rel=1e-9, abs=1e-12)
    assert ours.c2 == pytest.approx(a2 + b2, rel=1e-9)
    assert ours.c3 == pytest.approx(a3 + b3, rel=1e-9)


def test_the_constants_of_a_case_that_is_computed_by_hand():
    ones = dict.fromkeys(
        ["smoothness", "dissimilarity", "proximal_weight", "strong_convexity", "coefficient"], 1.0
    )
    ours = convergence_constants(**ones, cohort_size=2, basis="published")  # √(2/K) is 1
    assert ours.c1 == pytest.approx(1 - 1 - 1 / 2 - 1 - 3)
    assert ours.c2 == pytest.approx(1 + 2 + 2 + 2 + 7)
    assert ours.c3 == pytest.approx(2 + 1 + 4)
    assert not ours.converges


def test_the_first_constant_ignores_the_coefficient_and_the_others_grow_with_it():
    full = constants(coefficient=1.0)
    for c in (0.0, 0.1, 0.5, 0.9):
        part = constants(coefficient=c)
        assert part.c1 == full.c1
        assert part.c2 == pytest.approx(c * full.c2)
        assert part.c3 == pytest.approx(c**2 * full.c3)
    assert full.c2 > 0
    assert full.c3 > 0


def test_without_dissimilarity_the_first_constant_is_the_inverse_of_the_weight():
    for K in (1, 10):
        assert constants(dissimilarity=0.0, cohort_size=K).c1 == pytest.approx(1 / 0.8)


def test_the_first_constant_grows_with_the_cohort_and_shrinks_with_dissimilarity():
    by_cohort = [constants(cohort_size=K).c1 for K in (1, 5, 50, 500)]
    by_dissimilarity = [constants(dissimilarity=B).c1 for B in (0.0, 1.0, 1.5, 4.0)]
    assert by_cohort == sorted(by_cohort)
    assert by_dissimilarity == sorted(by_dissimilarity, reverse=True)
    assert len({*by_cohort, *by_dissimilarity}) == 8
    assert not constants(cohort_size=1).converges
    assert constants(cohort_size=500).converges


def test_the_bound_is_theorem_5_6_term_by_term():
    rounds = [constants(coefficient=c) for c in (0.9, 0.5, 0.1)]
    norms, steps = [3.0, 2.0, 1.5], [0.7, 0.4, 0.2]
    bound = gradient_norm_bound(rounds, initial_gap=5.0, gradient_norms=norms, steps=steps)
    c1 = rounds[0].c1
    expected = 5.0 / (3 * c1)
    for one, norm, step in zip(rounds, norms, steps, strict=True):
        expected += one.c2 * (norm * step) / (3 * c1) + one.c3 * step**2 / (3 * c1)
    assert bound == pytest.approx(expected, rel=1e-12)


def test_the_rate_of_corollary_5_8_needs_coefficients_that_shrink():
    def bound(schedule, M):
        rounds = [constants(coefficient=schedule(m)) for m in range(1, M + 1)]
        return gradient_norm_bound(
            rounds, initial_gap=2.0, gradient_norms=[1.0] * M, steps=[0.5] * M
        )

    sizes = (100, 400, 1600, 6400)
    of_all_rounds = [bound(lambda m, M=M: 0.9 / math.sqrt(M), M) * math.sqrt(M) for M in sizes]
    decaying = [bound(Decaying(0.9), M) * math.sqrt(M) for M in sizes]
    constant = [bound(lambda m: 0.9, M) * math.sqrt(M) for M in sizes]
    assert max(of_all_rounds) < 1.5 * min(of_all_rounds)  # the corollary's choice: O(1/√M)
    assert max(decaying) < 1.5 * min(decaying)  # the same without knowledge of M
    assert constant[-1] > 6 * constant[0]  # no rate at all


def promised_less_than_reached(problem, constants, *, before, after, c, K):
    """Return left minus right side of Lemma 5.5, over f; at most 0 if the lemma holds."""
    reached = problem.expected_value(after + c * (after - before), K)
    norm, step = problem.gradient_norm(after), float(np.linalg.norm(after - before))
    promised = (
        problem.value(after)
        - constants.c1 * norm**2
        + constants.c2 * norm * step
        + constants.c3 * step**2
    )
    return (reached - promised) / problem.value(after)


def random_case(rng, **how):
    problem = random_quadratics(rng, **how)
    K, c = int(10.0 ** rng.integers(1, 7)), float(rng.choice([0.0, 0.1, 0.5, 1.0]))
    before = rng.normal(size=3)
    after = before * rng.choice([0.3, 0.95]) + 0.1 * rng.normal(size=3)
    return problem, {"before": before, "after": after, "c": c, "K": K}


@pytest.mark.parametrize("basis", ["published", "provable"])
@pytest.mark.parametrize("mu", [0.4, 1.0])
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.6])
def test_lemma_5_5_holds_where_weight_and_smoothness_are_at_most_one(mu, scale, basis):
    assert largest_excess(mu=mu, scale=scale, basis=basis) < 1e-9


@pytest.mark.parametrize("mu", [2.0, 10.0, 100.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_with_both_steps_corrected_lemma_5_5_holds_above_one_too(mu, scale):
    assert largest_excess(mu=mu, scale=scale, basis="provable") < 1e-9
    assert largest_excess(mu=mu, scale=scale, basis="published") > 1e-4


def largest_excess(*, mu, scale, basis):
    """Return by how much a bound exceeds a real descent, at most, over random problems."""
    rng = np.random.default_rng(int(100 * (mu + scale)))
    excess = []
    for _ in range(200):
        problem, case = random_case(rng, mu=mu, scale=scale)
        ours = of_problem(problem, basis=basis, **case)
        excess.append(promised_less_than_reached(problem, ours, **case))
    return max(excess)


def of_problem(problem, *, basis, c, K, **_):
    return convergence_constants(**problem.facts, cohort_size=K, coefficient=c, basis=basis)


def test_lemma_5_5_as_printed_promises_too_much_above_weight_one():
    """One client's quadratic, all clients sampled, no extrapolation: the descent is exact."""
    problem = Quadratics([[1.0]], mu=10.0)
    case = {"before": np.array([2.0]), "after": np.array([1.0]), "c": 0.0, "K": 10**9}
    excess = {
        basis: promised_less_than_reached(problem, of_problem(problem, basis=basis, **case), **case)
        for basis in ("published", "provable")
    }
    assert excess["published"] > 0.01
    assert excess["provable"] <= 0
    page = " ".join((ROOT / "docs" / "proved" / "upcycled.md").read_text().split())
    start = problem.value(case["after"])
    assert f"F = {problem.value(problem.proximal_steps(case['after'])[0]):.5f}." in page
    for basis in ("published", "provable"):
        c1 = of_problem(problem, basis=basis, **case).c1
        assert f"{start:g} − {c1:.5f} = {start - c1:.5f}" in page


def test_the_table_of_the_page_is_what_the_constants_give():
    def row(name, value):
        return f"| {name} | {value('published'):.3f} | {value('provable'):.3f} |"

    def bound(coefficient, M, basis):
        rounds = [constants(coefficient=coefficient(m), basis=basis) for m in range(1, M + 1)]
        run = {"initial_gap": 5.0, "gradient_norms": [1.0] * M, "steps": [0.5] * M}
        return gradient_norm_bound(rounds, **run)

    rows = [
        row(
            f"C₁, {clients} clients a round",
            lambda basis, K=clients: constants(cohort_size=K, basis=basis).c1,
        )
        for clients in (10, 40)
    ] + [
        row(f"bound, c = {name}, M = {M}", lambda basis, c=c, M=M: bound(c, M, basis))
        for name, c in {"1/2": lambda m: 0.5, "1/(2√m)": Decaying(0.5)}.items()
        for M in (10, 100, 1000)
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "proved" / "upcycled.md").read_text()


@pytest.mark.parametrize("seed", range(5))
def test_up_to_one_the_printed_constants_are_only_more_careful(seed):
    rng = np.random.default_rng(seed)
    L, mu = rng.uniform(0.1, 1, 2)
    facts = {**USUAL, "smoothness": L, "proximal_weight": mu}
    printed, sound = (
        convergence_constants(**facts, basis=basis) for basis in ("published", "provable")
    )
    assert printed.c1 <= sound.c1
    assert printed.c2 >= sound.c2
    assert printed.c3 >= sound.c3


def bounds_of_a_descent(models, problem, *, c, K):
    """Return the least squared gradient norm, the sum of all over M, and Theorem 5.6's bound.

    ``models`` are w̄⁰, w̄¹, …, w̄²ᴹ. The proof bounds the sum over M, in which the initial norm is
    included, and which is not below the least.
    """
    odd, even = models[1::2], models[0:-1:2]
    norms = [problem.gradient_norm(w) for w in odd]
    ours = convergence_constants(**problem.facts, cohort_size=K, coefficient=c)
    assert ours.converges
    bound = gradient_norm_bound(
        [ours] * len(odd),
        initial_gap=problem.value(models[0]),
        gradient_norms=norms,
        steps=[float(np.linalg.norm(a - b)) for a, b in zip(odd, even, strict=True)],
    )
    squares = np.square(norms)
    total = float(squares.sum() + problem.gradient_norm(models[0]) ** 2) / len(odd)
    return float(squares.min()), total, bound


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rounds", [1, 3, 30])
def test_theorem_5_6_bounds_the_mean_descent_of_sampled_cohorts(c, rounds):
    rng = np.random.default_rng(rounds)
    problem = random_quadratics(rng, mu=1.0, scale=0.1)
    K, least, totals, bounds = 100, [], [], []
    for _ in range(200):
        models = [np.ones(3)]
        for _ in range(rounds):
            cohort = rng.integers(len(problem.a), size=K)
            models.append(problem.proximal_steps(models[-1])[cohort].mean(axis=0))
            models.append(models[-1] + c * (models[-1] - models[-2]))
        one = bounds_of_a_descent(models, problem, c=c, K=K)
        for values, value in zip((least, totals, bounds), one, strict=True):
            values.append(value)
    assert np.mean(least) < np.mean(totals) <= np.mean(bounds)


def test_the_bound_leaves_no_slack_to_a_single_flat_client():
    # With equal clients and no extrapolation, the telescoped descent is the bound, up to o(L).
    problem = Quadratics([[0.01]], mu=1.0)
    models = [np.ones(1)]
    for _ in range(200):
        models.append(problem.proximal_steps(models[-1]).mean(axis=0))
        models.append(models[-1])
    least, total, bound = bounds_of_a_descent(models, problem, c=0.0, K=10**9)
    assert least <= 0.999 * bound
    assert 0.97 * bound < total <= bound


def test_upcycled_fedprox_with_exact_minimisers_keeps_to_the_bound():
    clients, mu, penalty, rounds = 30, 1.0, 1.5, 5
    rng = np.random.default_rng(3)
    curvatures = 0.2 * np.exp(0.2 * rng.uniform(-1, 1, (clients, 2)))
    best = np.array([1.0, -2.0])

    def data(client):
        # Two examples along the axes: the mean of ½ (x·w − y)² has curvatures x²/2.
        x = torch.tensor(np.diag(np.sqrt(2 * curvatures[client])), dtype=torch.float32)
        examples = Examples(features=x, targets=x @ torch.tensor(best, dtype=torch.float32))
        return ClientData(train=examples, test=examples)

    task = Task(
        model=lambda: nn.Linear(2, 1, bias=False),
        data=data,
        loss=lambda outputs, y: 0.5 * (outputs.squeeze(1) - y).square().mean(),
        metrics={},
        device="cpu",
    )
    base = FederatedStrategy(
        Hosted(FedProx(proximal_mu=mu), local=LocalTraining(tolerance=1e-9)),
        NonPrivatePlan(sampling=FullParticipation(clients)),
        evaluate_every=0,
        seed=1,
    )
    models = []

    def keep(server_round, arrays):
        models.append(records.to_arrays(arrays)["weight"].astype(np.float64)[0] - best)

    coefficient = proximal_ratio(proximal_weight=mu, penalty=penalty)
    Upcycled(base, coefficient).start(
        InProcessGrid(Hosted.client_app(task), num_clients=clients),
        ArrayRecord(task.initial_params(1)),
        num_rounds=2 * rounds,
        evaluate_fn=keep,
    )
    assert base.refusals == []
    problem = Quadratics(curvatures, mu)
    by_hand = [models[0]]
    for _ in range(rounds):
        by_hand.append(problem.proximal_steps(by_hand[-1]).mean(axis=0))
        by_hand.append(by_hand[-1] + coefficient * (by_hand[-1] - by_hand[-2]))
    np.testing.assert_allclose(models, by_hand, atol=1e-5)
    least, total, bound = bounds_of_a_descent(models, problem, c=coefficient, K=clients)
    assert least < total <= bound
