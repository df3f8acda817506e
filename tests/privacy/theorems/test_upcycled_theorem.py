"""The guarantees of Theorems 6.2 and 6.3 of Upcycled-FL, checked against real neighbours.

This module writes out the references from the paper, in NumPy and SciPy.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from scipy import optimize, special, stats

from flower_ext.data import Examples
from flower_ext.privacy import (
    AdversaryView,
    Guarantee,
    LocalObjective,
    NeighboringRelation,
    ObjectivePerturbation,
    OutputPerturbation,
    PrivacyUnit,
    SeededNoise,
    clip,
    epsilon_text,
)
from flower_ext.privacy.accounting.gaussian import EXACT_GAUSSIAN
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.theorems import upcycled_theorem
from flower_ext.privacy.theorems.upcycled_theorem import (
    clipped_model_sensitivity,
    upcycled_theorem_6_2,
    upcycled_theorem_6_3,
)
from flower_ext.training.local import newton
from tests.support.grids import grid
from tests.support.perturbed import noiseless
from tests.support.run_summary import run_summary

# An L2-regularised logistic regression of two classes, solved exactly.
KNOWN = LocalObjective(
    convex=True,
    generalised_linear=True,
    gradient_bound=1.0,
    curvature_bound=0.25,
    feature_norm_bound=1.0,
    proximal_weight=0.1,
    distance_to_minimiser=0.0,
    memoryless=True,
)
OUTPUT = OutputPerturbation(clipping_norm=1.5, noise_stddev=0.2)
OBJECTIVE = ObjectivePerturbation(rate=3.0)


# References -------------------------------------------------------------------------------------


class Logistic:
    """The loss ln(1 + exp(−y t)) of a margin t = ⟨w, x⟩, with labels ±1."""

    slope_bound, curvature_bound = 1.0, 0.25

    @staticmethod
    def slope(t, y):
        return -y * special.expit(-y * t)

    @staticmethod
    def curvature(t, y):
        return special.expit(t) * special.expit(-t)


class PseudoHuber:
    """The loss √(1 + (t − y)²), whose slopes reach −1 and 1, so that bounds on them are tight."""

    slope_bound, curvature_bound = 1.0, 1.0

    @staticmethod
    def slope(t, y):
        return (t - y) / np.sqrt(1 + (t - y) ** 2)

    @staticmethod
    def curvature(t, y):
        return (1 + (t - y) ** 2) ** -1.5


def gradient(loss, w, x, y, mu, anchor):
    """Return ∇ of the mean loss + (μ/2)‖w − w̄‖², at one w or at each row of ``w``."""
    return loss.slope(w @ x.T, y) @ x / len(y) + mu * (w - anchor)


def hessian(loss, w, x, y, mu):
    curvatures = loss.curvature(w @ x.T, y)
    return np.einsum("...n,ni,nj->...ij", curvatures, x, x) / len(y) + mu * np.eye(x.shape[1])


def minimiser(loss, x, y, mu, anchor):
    found = optimize.root(
        lambda w: gradient(loss, w, x, y, mu, anchor),
        anchor,
        jac=lambda w: hessian(loss, w, x, y, mu),
        tol=1e-13,
    ).x
    assert np.linalg.norm(gradient(loss, found, x, y, mu, anchor)) < 1e-10
    return found


def delta_of_gaussians(distance, stddev, releases, epsilon):
    """Return the least δ of ``releases`` Gaussians ``distance`` apart (Balle and Wang 2018)."""
    mu = distance * math.sqrt(releases) / stddev
    right = stats.norm.logcdf(mu / 2 - epsilon / mu)
    return math.exp(right) - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))


# Theorem 6.2 ------------------------------------------------------------------------------------

OUTPUTS = [
    (OutputPerturbation(clipping_norm=tau, noise_stddev=sigma), size, rounds)
    for tau, sigma, size, rounds in [
        (1.0, 0.1, 50, 1),
        (2.0, 0.5, 7, 40),
        (0.3, 1.0, 1000, 100),
        (10.0, 0.1, 20, 3),
    ]
]


@pytest.mark.parametrize(("perturbation", "size", "rounds"), OUTPUTS)
@pytest.mark.parametrize("delta", [1e-5, 1e-2, 0.3])
def test_epsilon_of_theorem_6_2_is_the_formula_of_the_paper(perturbation, size, rounds, delta):
    """The formula is written out as printed, with Mτ²/(2σ²|D|²) both times."""
    tau, sigma = perturbation.clipping_norm, perturbation.noise_stddev
    printed = 2 * math.sqrt(
        (rounds * tau**2) / (2 * sigma**2 * size**2) * math.log(1 / delta)
    ) + rounds * tau**2 / (2 * sigma**2 * size**2)
    epsilon = upcycled_theorem_6_2(
        perturbation, num_examples=size, participations=rounds, delta=delta
    )
    assert epsilon == pytest.approx(printed, rel=1e-12)
    # The proof, Appendix E: δ is the least moment bound over λ >= 0.
    least = rounds * tau**2 / (2 * sigma**2 * size**2)
    orders = np.linspace(0, 3 * math.sqrt(math.log(1 / delta) / least), 400_001)
    moments = least * orders * (orders + 1) - orders * epsilon
    assert math.exp(moments.min()) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("perturbation", "size", "rounds"), OUTPUTS)
@pytest.mark.parametrize("factor", [1.001, 1.5, 4.0])
def test_delta_of_theorem_6_2_is_the_papers_formula_and_inverts_epsilon(
    perturbation, size, rounds, factor
):
    tau, sigma = perturbation.clipping_norm, perturbation.noise_stddev
    a = rounds * tau**2 / (2 * sigma**2 * size**2)
    epsilon, known = factor * a, {"num_examples": size, "participations": rounds}
    delta = math.exp(-a * (epsilon * sigma**2 * size**2 / (rounds * tau**2) - 1 / 2) ** 2)
    if 0 < delta < 1:
        assert upcycled_theorem_6_2(perturbation, delta=delta, **known) == pytest.approx(epsilon)
    # Gaussians τ/|D| apart need no more.
    assert delta_of_gaussians(tau / size, sigma, rounds, epsilon) <= delta * (1 + 1e-9)


SIZES_OF_SYN_IID = (
    *(45, 49, 53, 53, 60, 68, 69, 72, 76, 78, 100, 117, 122, 133, 142),
    *(144, 155, 173, 189, 198, 221, 296, 367, 385, 399, 417, 446, 467, 467, 482),
)
"""Training records of the authors' 30 devices."""


@pytest.mark.parametrize(("tau", "printed"), [(2.0, ("0.773", "0.683")), (4.0, ("1.59", "1.40"))])
def test_two_pairs_of_published_mean_epsilons_have_two_clipping_norms(tau, printed):
    def mean(stddev, rounds):
        output = OutputPerturbation(clipping_norm=tau, noise_stddev=stddev)
        known = {"participations": rounds, "delta": 1e-5}
        each = [upcycled_theorem_6_2(output, num_examples=n, **known) for n in SIZES_OF_SYN_IID]
        return sum(each) / len(each)

    plain, upcycled = mean(1.0, 80), mean(0.8, 40)
    assert (plain, upcycled) == pytest.approx([float(value) for value in printed], rel=7e-3)
    page = (Path(__file__).parents[3] / "docs/proved/upcycled.md").read_text()
    assert f"| {tau:g} | {plain:.3f} | {upcycled:.3f} | {', '.join(printed)} |" in page


def test_by_theorem_6_2_absent_clients_spend_nothing():
    facts = {"num_examples": 10, "participations": 0}
    assert upcycled_theorem_6_2(OUTPUT, delta=1e-3, **facts) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_examples", 0), ("participations", -1), ("delta", 0.0), ("delta", 1.0)],
)
def test_unfit_arguments_of_theorem_6_2_are_refused_by_name(field, value):
    facts = {"num_examples": 10, "participations": 2, "delta": 0.1}
    with pytest.raises(ValueError, match=f"{field}="):
        upcycled_theorem_6_2(OUTPUT, **{**facts, field: value})


# Counterexample to Theorem 6.2's sensitivity ----------------------------------------------------


def torch_minimiser(x, y, mu, anchor) -> np.ndarray:
    """Return the local model as a client of this package finds it."""

    def loss(params, features, labels):
        margins = labels * (features @ params["w"])
        mean = torch.nn.functional.softplus(-margins).mean()
        return mean + mu / 2 * (params["w"] - torch.from_numpy(anchor)).square().sum()

    examples = Examples(features=torch.from_numpy(x), targets=torch.from_numpy(y))
    found = newton(loss, {"w": torch.from_numpy(anchor)}, examples, tolerance=1e-12)
    return found["w"].numpy()


def majority(positive: int, negative: int):
    """Return records that differ only in their labels."""
    labels = np.array([1.0] * positive + [-1.0] * negative)
    return np.ones((len(labels), 1)), labels


def test_one_record_moves_a_clipped_model_by_two_tau_undivided():
    """51 against 50 votes, or 50 against 51: the model moves to opposite ends of the ball.

    One logistic weight, exact minimisers, |D| = 101: every condition of Theorem 6.2 holds, but its
    (ε, δ) does not.
    """
    size, mu, delta = 101, 0.01, 1e-3
    perturbation = OutputPerturbation(clipping_norm=0.01, noise_stddev=0.01)
    objective = replace(KNOWN, proximal_weight=mu)
    models = [
        torch_minimiser(*majority(positive, size - positive), mu, np.zeros(1))
        for positive in (51, 50)
    ]
    here, there = (clip({"w": model}, perturbation.clipping_norm).value["w"] for model in models)
    moved = float(np.linalg.norm(here - there))
    claimed = perturbation.clipping_norm / size
    assert moved == pytest.approx(2 * perturbation.clipping_norm, rel=1e-6)
    assert moved > 100 * (2 * claimed)  # replace-one would allow the theorem twice its τ/|D|
    assert moved <= clipped_model_sensitivity(perturbation, objective, size)

    facts = {"num_examples": size, "participations": 1}
    published = upcycled_theorem_6_2(perturbation, delta=delta, **facts)
    ((_, provable),) = epsilons_by_client(
        perturbation,
        objective,
        num_examples={0: size},
        participations={0: 1},
        delta=delta,
    ).values()
    stddev = perturbation.noise_stddev
    assert delta_of_gaussians(moved, stddev, 1, published) > 0.5  # the theorem says 0.001
    assert delta_of_gaussians(moved, stddev, 1, provable) <= delta * (1 + 1e-6)


def test_the_stability_bound_of_a_minimiser_is_reached():
    """A loss of slope ±1 far from its label: one label moves the minimiser by 2u₁/(|D|μ)."""
    size, mu = 8, 0.5
    x, far = np.ones((size, 1)), 1e4
    labels = np.full(size, far)
    models = [
        minimiser(PseudoHuber, x, np.append(labels[1:], last), mu, np.zeros(1))
        for last in (far, -far)
    ]
    moved = float(np.linalg.norm(models[0] - models[1]))
    objective = LocalObjective(
        convex=True,
        gradient_bound=1.0,
        proximal_weight=mu,
        distance_to_minimiser=0.0,
        memoryless=True,
    )
    bound = objective.stability(size)
    assert bound == pytest.approx(2 / (size * mu))
    assert 0.999 * bound < moved <= bound * (1 + 1e-9)


# Stability --------------------------------------------------------------------------------------


def in_unit_ball(rng, count, dimension):
    x = rng.normal(size=(count, dimension))
    return x / np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))


def neighbours(rng):
    """Return a logistic problem and its copy with another first record, extreme ones included."""
    count, dimension = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    x, y = in_unit_ball(rng, count, dimension), rng.choice([-1.0, 1.0], count)
    if rng.random() < 0.5:
        x[:] = x[0] / np.linalg.norm(x[0])
    other_x, other_y = x.copy(), y.copy()
    other_x[0] = -x[0] if rng.random() < 0.5 else in_unit_ball(rng, 1, dimension)[0]
    other_y[0] = -y[0] if rng.random() < 0.5 else y[0]
    return (x, y), (other_x, other_y), float(10 ** rng.uniform(-2, 1)), rng.normal(size=dimension)


@pytest.mark.parametrize("seed", range(60))
def test_neighbouring_minimisers_are_as_close_as_promised_clipped_or_not(seed):
    rng = np.random.default_rng(seed)
    first, second, mu, anchor = neighbours(rng)
    models = [minimiser(Logistic, x, y, mu, anchor) for x, y in (first, second)]
    size, objective = len(first[1]), replace(KNOWN, proximal_weight=mu)
    stable = objective.stability(size)
    assert stable == pytest.approx(2 * 1.0 / (size * mu))
    assert np.linalg.norm(models[0] - models[1]) <= stable + 1e-9

    for tau in (0.1, 1.0, 10.0):
        clipped = [clip({"w": model}, tau).value["w"] for model in models]
        bound = clipped_model_sensitivity(
            OutputPerturbation(clipping_norm=tau, noise_stddev=1.0), objective, size
        )
        assert min(2 * tau, stable) <= bound <= min(2 * tau, stable + 1e-6 * tau)  # rounding
        assert np.linalg.norm(clipped[0] - clipped[1]) <= bound + 1e-9

    # Two solvers that stop within a distance of the minimiser can stray in opposite directions.
    off, apart = 0.3, models[0] - models[1]
    push = (
        off * apart / np.linalg.norm(apart)
        if np.linalg.norm(apart)
        else off * np.eye(len(apart))[0]
    )
    strayed = np.linalg.norm((models[0] + push) - (models[1] - push))
    loose = replace(objective, distance_to_minimiser=off).stability(size)
    assert strayed <= loose + 1e-9
    assert strayed > np.linalg.norm(apart) + 1.99 * off  # so a single distance would not be enough


@pytest.mark.parametrize(
    "unknown",
    [
        {"convex": False},
        {"memoryless": False},
        {"proximal_weight": 0.0},
        {"gradient_bound": math.inf},
        {"distance_to_minimiser": math.inf},
    ],
)
def test_without_one_fact_only_the_balls_diameter_bounds_a_record(unknown):
    assert clipped_model_sensitivity(OUTPUT, KNOWN, 100) < 2 * 1.5
    assert replace(KNOWN, **unknown).stability(100) == math.inf
    assert clipped_model_sensitivity(OUTPUT, replace(KNOWN, **unknown), 100) == 2 * 1.5


def test_a_client_of_unknown_size_can_move_its_model_across_the_ball():
    assert clipped_model_sensitivity(OUTPUT, KNOWN, None) == 2 * 1.5


# Theorem 6.3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 5.0])
@pytest.mark.parametrize(("size", "rounds", "mu"), [(5, 1, 0.1), (80, 25, 0.3)])
def test_epsilon_of_theorem_6_3_is_the_sum_of_the_paper(rate, size, rounds, mu):
    u1, u2 = KNOWN.gradient_bound, KNOWN.curvature_bound
    printed = sum((2 * rate * u1 * mu + 2.8 * u2) / (size * mu) for _ in range(rounds))
    epsilon = upcycled_theorem_6_3(
        ObjectivePerturbation(rate=rate),
        replace(KNOWN, proximal_weight=mu),
        num_examples=size,
        participations=rounds,
    )
    assert epsilon == pytest.approx(printed, rel=1e-12)


def problems_in_one_dimension(label):
    """Yield neighbouring sets of four records; the replaced record is at the ends of its range."""
    nothing, something = np.zeros((4, 1)), np.array([[0.0], [0.0], [0.0], [1.0]])
    yield (nothing, label * np.ones(4)), (something, label * np.ones(4))
    for ends in itertools.product((-1.0, 1.0), repeat=3):
        x = np.array([[1.0], [-1.0], [0.5], [ends[0]]])
        y = label * np.array([1.0, 1.0, -1.0, ends[1]])
        other = np.append(y[:3], label * ends[2])
        yield (x, y), (x, other)
        yield (x, y), (np.vstack([x[:3], -x[3:]]), other)


def problems_in_two_dimensions(label):
    rng = np.random.default_rng(4)
    for turn in np.linspace(0, np.pi, 7):
        x = np.vstack([in_unit_ball(rng, 3, 2), [[1.0, 0.0]]])
        y = label * rng.choice([-1.0, 1.0], 4)
        other = np.vstack([x[:3], [[np.cos(turn), np.sin(turn)]]])
        yield (x, y), (other, y)
        yield (x, y), (other, np.append(y[:3], -y[3]))


def log_density(loss, points, data, rate, mu, anchor):
    """Return the log density of the released minimiser at ``points``, up to a constant.

    n = −∇(F(w) + (μ/2)‖w − w̄‖²) is the noise that makes w the minimiser; its Jacobian is −∇².
    """
    x, y = data
    noise = np.linalg.norm(gradient(loss, points, x, y, mu, anchor), axis=1)
    return -rate * noise + np.linalg.slogdet(hessian(loss, points, x, y, mu))[1]


LINE = np.linspace(-60, 60, 1201)[:, None]
PLANE = np.array(list(itertools.product(np.linspace(-12, 12, 21), repeat=2)))


@pytest.mark.parametrize(
    ("loss", "label", "problems", "points", "rate", "mu", "tight"),
    [
        (Logistic, 1.0, problems_in_one_dimension, LINE, 4.0, 0.125, 0.25),
        (Logistic, 1.0, problems_in_one_dimension, LINE, 0.01, 0.125, 0.2),
        (Logistic, 1.0, problems_in_two_dimensions, PLANE, 4.0, 0.2, 0.25),
        (PseudoHuber, 500.0, problems_in_one_dimension, LINE, 20.0, 0.5, 0.75),
        (PseudoHuber, 500.0, problems_in_two_dimensions, PLANE, 20.0, 0.5, 0.75),
        (PseudoHuber, 1.0, problems_in_two_dimensions, PLANE, 0.1, 0.5, 0.25),
    ],
)
def test_densities_of_released_minimisers_differ_at_most_as_theorem_6_3_allows(
    loss, label, problems, points, rate, mu, tight
):
    """The test is exact, by the bijection of noise and minimiser; ``tight`` of ε is reached."""
    objective = replace(
        KNOWN,
        gradient_bound=loss.slope_bound,
        curvature_bound=loss.curvature_bound,
        proximal_weight=mu,
    )
    epsilon = upcycled_theorem_6_3(
        ObjectivePerturbation(rate=rate), objective, num_examples=4, participations=1
    )
    anchor = np.full(points.shape[1], 0.3)
    largest = 0.0
    for here, there in problems(label):
        densities = [log_density(loss, points, data, rate, mu, anchor) for data in (here, there)]
        largest = max(largest, float(np.abs(densities[0] - densities[1]).max()))
    assert largest <= epsilon
    assert largest >= tight * epsilon


@pytest.mark.full
def test_the_minimiser_that_a_client_finds_has_the_density_of_the_proof():
    """One weight: P(W <= w) is the probability that the noise is at least −∇F(w) − μ(w − w̄)."""
    rate, mu, anchor, draws = 5.0, 0.3, 0.2, 150
    x, y = np.array([[1.0], [0.5], [-1.0]]), np.array([1.0, -1.0, -1.0])
    noise, perturbation = SeededNoise(8), ObjectivePerturbation(rate=rate)
    examples = Examples(features=torch.from_numpy(x), targets=torch.from_numpy(y))
    found = []
    for _ in range(draws):
        n = torch.from_numpy(perturbation.direction({"w": np.zeros(1)}, noise)["w"])

        def loss(params, features, labels, n=n):
            w = params["w"]
            data = torch.nn.functional.softplus(-labels * (features @ w)).mean()
            return data + mu / 2 * (w - anchor).square().sum() + (n * w).sum()

        start = {"w": torch.zeros(1, dtype=torch.float64)}
        found.append(float(newton(loss, start, examples, tolerance=1e-11)["w"]))

    def chance(points, rate):
        slopes = [gradient(Logistic, np.array([w]), x, y, mu, np.array([anchor])) for w in points]
        return stats.laplace.sf(-np.array(slopes).ravel(), scale=1 / rate)

    assert stats.kstest(found, lambda points: chance(points, rate)).pvalue > 1e-3
    for wrong in (1 / 3, 3.0):
        assert stats.kstest(found, lambda points, r=wrong * rate: chance(points, r)).pvalue < 1e-3


PRECONDITIONS = [
    ({"generalised_linear": False}, "the loss is a generalised linear model"),
    ({"convex": False}, "the loss is convex"),
    ({"gradient_bound": math.inf}, "gradients of a record are bounded"),
    ({"curvature_bound": math.inf}, "curvature is bounded"),
    ({"feature_norm_bound": 1.01}, r"features have norm at most 1 \(at most 1.01\)"),
    ({"proximal_weight": 0.0}, "the proximal weight is above 0"),
]


@pytest.mark.parametrize(("unmet", "said"), PRECONDITIONS)
def test_each_precondition_of_theorem_6_3_is_checked_and_named(unmet, said):
    objective = replace(KNOWN, **unmet)
    with pytest.raises(PreconditionFailed, match=said):
        upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=1000, participations=1)
    with pytest.raises(PreconditionFailed, match=said):
        objective.least_examples()


def test_all_unmet_preconditions_are_named_at_once_and_met_ones_are_not():
    objective = replace(KNOWN, generalised_linear=False, feature_norm_bound=3.0)
    with pytest.raises(PreconditionFailed) as caught:
        upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=2, participations=1)
    said = str(caught.value)
    for unmet in ("Theorem 6.3", "generalised linear", "at most 3", "u₂ ≤ 0.5 |D_i| μ (0.25"):
        assert unmet in said
    assert "convex" not in said
    assert "curvature is bounded" not in said


@pytest.mark.parametrize(("curvature", "mu"), [(0.25, 0.1), (0.25, 0.07), (1.0, 2.0), (1.0, 30.0)])
def test_the_least_number_of_examples_is_where_the_theorem_begins(curvature, mu):
    objective = replace(KNOWN, curvature_bound=curvature, proximal_weight=mu)
    least = objective.least_examples()
    assert least >= 1
    assert curvature <= 0.5 * least * mu
    upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=least, participations=1)
    assert least == 1 or curvature > 0.5 * (least - 1) * mu
    with pytest.raises(PreconditionFailed, match=r"u₂ ≤ 0.5 \|D_i\| μ"):
        upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=least - 1, participations=1)


# Guarantees of a run ----------------------------------------------------------------------------

SIZES = {0: 50, 1: 400, 2: 120}
UPLOADS = {0: 3, 1: 12, 2: 1}


def pair(perturbation, objective=KNOWN, *, sizes=SIZES, uploads=UPLOADS, delta=1e-3, **how):
    """Return the published and the provable guarantee."""
    run = run_summary(uploads, num_examples=sizes, **how)
    return upcycled_theorem.perturbation_guarantees(perturbation, objective, run, delta=delta)


def epsilons_by_client(perturbation, objective, *, num_examples, participations, delta):
    run = run_summary(participations, num_examples=num_examples)
    return upcycled_theorem.epsilons_by_client(perturbation, objective, run, delta=delta)


def spread(values):
    values = list(values)
    return (
        f"{len(values)} clients: min {min(values):.4g}, mean {sum(values) / len(values):.4g}, "
        f"max {max(values):.4g}"
    )


def test_output_perturbation_is_guaranteed_as_published_and_as_provable():
    """All numbers by hand: Theorem 6.2, and Gaussians min(2τ, 2u₁/(|D|μ)) apart."""
    published, provable = pair(OUTPUT)
    theorem = {
        client: upcycled_theorem_6_2(
            OUTPUT, num_examples=SIZES[client], participations=UPLOADS[client], delta=1e-3
        )
        for client in SIZES
    }
    assert published.epsilon == max(theorem.values())
    assert "Theorem 6.2" in published.source
    assert spread(theorem.values()) in published.source
    by_client = epsilons_by_client(
        OUTPUT, KNOWN, num_examples=SIZES, participations=UPLOADS, delta=1e-3
    )
    assert {client: both[0] for client, both in by_client.items()} == theorem
    for client, (_, epsilon) in by_client.items():
        distance = min(2 * 1.5, 2 * 1.0 / (SIZES[client] * 0.1))
        facts = (distance, 0.2, UPLOADS[client])
        # The ε is never below the correct one.
        assert delta_of_gaussians(*facts, epsilon) <= 1e-3 * (1 + 1e-12)
        assert delta_of_gaussians(*facts, epsilon * 0.999) > 1e-3  # and not above it
    assert provable.epsilon == max(both[1] for both in by_client.values())
    assert spread(both[1] for both in by_client.values()) in provable.source
    assert "2u₁/(|D_i|μ), at most 0.4" in provable.source
    assert provable.accountant == EXACT_GAUSSIAN


@pytest.mark.parametrize(
    ("objective", "stddev", "rounds", "delta"),
    grid(
        [
            pytest.param(objective, *facts, id=f"{name}-{facts[1]}")
            for name, objective in (("stable", KNOWN), ("unknown", LocalObjective()))
            for facts in ((1.0, 2, 1e-2), (4.0, 30, 1e-5))
        ],
        lambda name: name != "unknown-2",
    ),
)
def test_the_provable_epsilon_is_what_dp_accounting_composes(objective, stddev, rounds, delta):
    size, perturbation = 60, OutputPerturbation(clipping_norm=1.5, noise_stddev=stddev)
    ((_, provable),) = epsilons_by_client(
        perturbation,
        objective,
        num_examples={3: size},
        participations={3: rounds},
        delta=delta,
    ).values()
    distance = min(2 * 1.5, 2 / (60 * 0.1)) if objective.convex else 2 * 1.5
    accountants = pld.PLDAccountant(), rdp.RdpAccountant()
    for accountant in accountants:
        accountant.compose(dp_accounting.GaussianDpEvent(stddev / distance), rounds)
    tight, loose = (accountant.get_epsilon(delta) for accountant in accountants)
    assert provable == pytest.approx(tight, rel=1e-5)
    assert provable < loose


def test_the_provable_epsilon_grows_with_everything_that_reveals_more():
    def provable(**changes):
        facts = {"stddev": 1.0, "size": 50, "rounds": 5, "delta": 1e-3, **changes}
        ((_, value),) = epsilons_by_client(
            OutputPerturbation(clipping_norm=1.5, noise_stddev=facts["stddev"]),
            KNOWN,
            num_examples={0: facts["size"]},
            participations={0: facts["rounds"]},
            delta=facts["delta"],
        ).values()
        return value

    for more in ({"stddev": 0.5}, {"size": 25}, {"rounds": 6}, {"delta": 1e-4}):
        assert provable(**more) > provable() > 0


def test_a_published_epsilon_below_the_provable_one_says_which_condition_fails():
    published, provable = pair(OUTPUT)
    assert published.epsilon < provable.epsilon
    assert not published.conditions_hold
    assert "Conditions NOT met: one record moves a clipped local model" in published.statement()
    assert provable.conditions_hold
    # The ball is so large that stability is below τ/|D| of every client, so the condition is met.
    stiff = replace(KNOWN, proximal_weight=10.0)
    wide = OutputPerturbation(clipping_norm=5.0, noise_stddev=1.0)
    assert pair(wide, stiff)[0].conditions_hold
    assert not pair(wide, replace(stiff, memoryless=False))[0].conditions_hold


def test_without_bounds_output_perturbation_is_accounted_across_the_ball():
    _, provable = pair(OUTPUT, LocalObjective())
    assert "sensitivity 2τ = 3" in provable.source
    assert delta_of_gaussians(3.0, 0.2, 12, provable.epsilon) == pytest.approx(1e-3, rel=1e-3)


def test_objective_perturbation_is_guaranteed_by_theorem_6_3_where_its_conditions_hold():
    published, provable = pair(OBJECTIVE)
    theorem = [
        UPLOADS[client] * (2 * 3.0 * 1.0 * 0.1 + 2.8 * 0.25) / (SIZES[client] * 0.1)
        for client in SIZES
    ]
    for guarantee in (published, provable):
        assert guarantee.epsilon == pytest.approx(max(theorem))
        assert guarantee.delta == 0.0
        assert "Theorem 6.3" in guarantee.source
        assert spread(theorem) in guarantee.source
        assert guarantee.conditions_hold


@pytest.mark.parametrize(
    ("unmet", "said"),
    [
        ({"distance_to_minimiser": math.inf}, "exact minimisers (training by SGD"),
        ({"distance_to_minimiser": 1e-4}, "exact minimisers (distance at most 0.0001)"),
        ({"memoryless": False}, "clients keep no state"),
    ],
)
def test_objective_perturbation_of_an_inexact_solver_proves_nothing(unmet, said):
    published, provable = pair(OBJECTIVE, replace(KNOWN, **unmet))
    assert math.isfinite(published.epsilon)
    assert math.isinf(provable.epsilon)
    assert "No (ε, δ) is promised" in provable.statement()
    for guarantee in (published, provable):
        assert not guarantee.conditions_hold
        assert said in guarantee.statement()


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_small_client_or_one_of_unknown_size_is_shown(perturbation):
    for sizes in ({**SIZES, 0: 4}, {1: 400, 2: 120}):  # 2u₂/μ = 5
        by_client = epsilons_by_client(
            perturbation, KNOWN, num_examples=sizes, participations=UPLOADS, delta=1e-3
        )
        others = epsilons_by_client(
            perturbation,
            KNOWN,
            num_examples=SIZES,
            participations={1: 12, 2: 1},
            delta=1e-3,
        )
        assert {client: by_client[client] for client in others} == others
        published, provable = pair(perturbation, sizes=sizes)
        assert provable.epsilon == max(both[1] for both in by_client.values())
        if perturbation is OBJECTIVE:
            assert by_client[0] == (math.inf, math.inf)
            assert math.isinf(published.epsilon)
        else:
            assert delta_of_gaussians(3.0, 0.2, 3, provable.epsilon) == pytest.approx(
                1e-3, rel=1e-3
            )
            assert math.isinf(published.epsilon) == (0 not in sizes)


def test_each_client_is_accounted_by_its_uploads_and_size():
    every = epsilons_by_client(
        OUTPUT, KNOWN, num_examples=SIZES, participations=UPLOADS, delta=1e-3
    )
    for client in UPLOADS:
        alone = epsilons_by_client(
            OUTPUT,
            KNOWN,
            num_examples={client: SIZES[client]},
            participations={client: UPLOADS[client]},
            delta=1e-3,
        )
        assert alone[client] == every[client]
    # Sizes of clients that the server never asked change nothing.
    more = {**SIZES, 9: 1}
    assert pair(OUTPUT, sizes=more) == pair(OUTPUT)
    assert pair(OBJECTIVE, sizes=more) == pair(OBJECTIVE)


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_run_that_asked_nobody_spent_nothing_and_says_so(perturbation):
    for guarantee in pair(perturbation, uploads={}):
        assert guarantee.epsilon == 0.0
        assert "no client was asked" in guarantee.source


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
@pytest.mark.parametrize("objective", [KNOWN, LocalObjective()], ids=["known", "unknown"])
def test_every_guarantee_names_all_that_it_needs_and_survives_json(perturbation, objective):
    guarantees = pair(perturbation, objective, delta=2.5e-4, not_covered=["test scores"])
    assert [guarantee.basis for guarantee in guarantees] == ["published", "provable"]
    for guarantee in guarantees:
        assert guarantee.unit is PrivacyUnit.RECORD
        assert guarantee.relation is NeighboringRelation.REPLACE_ONE
        assert guarantee.view is AdversaryView.EACH_UPLOAD
        text = guarantee.statement()
        for word in (
            "one record",
            "replace-one",
            "every upload and who sent it",
            guarantee.basis,
            guarantee.accountant,
            guarantee.source,
            "Not covered: test scores",
        ):
            assert word in text
        if math.isfinite(guarantee.epsilon):
            assert f"ε = {epsilon_text(guarantee.epsilon)} at" in text
            assert ("δ = 0.00025" if perturbation is OUTPUT else "δ = 0 ") in text
        assert Guarantee.from_dict(guarantee.to_dict()) == guarantee
    assumed = guarantees[1].statement()
    for word in ("Assumes:", "add noise as instructed", "examples are public"):
        assert word in assumed
    assert ("rounded to a public grid" in assumed) == (perturbation is OUTPUT)
    assert ("low-order bits" in assumed) == (perturbation is OBJECTIVE)  # its noise is on no grid


@pytest.mark.parametrize("norm", [0.5, 1.0, 7.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_a_models_precision_is_within_the_sensitivity(norm, dtype):
    """One of 10⁹ records hardly moves the minimiser; rounding moves the value that is noised."""
    if norm == 1e6 and dtype is torch.float16:
        return  # such a model is infinite
    tau, size = 1.5, 10**9
    objective = replace(KNOWN, proximal_weight=1.0, rounding=torch.finfo(dtype).eps / 2)
    unrounded = clipped_model_sensitivity(OUTPUT, replace(objective, rounding=0.0), size)
    for seed in range(20):
        model = torch.randn(8_000, generator=torch.Generator().manual_seed(seed)).double()
        model *= norm * tau / model.norm()
        exact = noiseless({"w": model}, tau)["w"]
        rounded = noiseless({"w": model.to(dtype)}, tau)["w"]
        assert rounded.dtype == torch.float64  # not rounded before the noise was added
        assert (
            unrounded
            < (rounded - exact).norm()
            <= clipped_model_sensitivity(OUTPUT, objective, size) / 2
        )


def test_seeded_noise_is_named_as_simulation():
    for secure, word in ((True, "cryptographic generator"), (False, "SIMULATION")):
        _, provable = pair(OUTPUT, secure_noise=secure)
        assert any(word in text for text in provable.assumptions)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_an_unfit_delta_is_refused_by_name(perturbation, delta):
    with pytest.raises(ValueError, match="delta="):
        pair(perturbation, delta=delta)


# Corners ----------------------------------------------------------------------------------------


def test_outside_theorem_6_3_the_guarantee_says_so_without_raising():
    """As for an unknown u₂, ε is infinite, as `epsilons_by_client` documents."""
    objective = replace(KNOWN, generalised_linear=False)
    run = {"num_examples": {0: 50}, "participations": {0: 1}, "delta": 0.1}
    unknown = {0: (math.inf, math.inf)}
    assert epsilons_by_client(OBJECTIVE, LocalObjective(), **run) == unknown  # this works
    assert epsilons_by_client(OBJECTIVE, objective, **run) == unknown


def test_with_no_size_known_the_published_condition_is_not_said_to_hold():
    published, _ = pair(OUTPUT, sizes={}, uploads={0: 1}, delta=0.1)
    assert not published.conditions_hold


def test_the_source_names_the_sensitivity_that_the_largest_epsilon_was_computed_with():
    """Client 0 never reported its size: it counts at 2τ = 3, the source says 'at most 0.4'."""
    _, provable = pair(OUTPUT, sizes={1: 50}, uploads={0: 1, 1: 1}, delta=0.1)
    assert "at most 0.4" not in provable.source


def test_negative_participations_are_refused_by_theorem_6_3_as_by_6_2():
    with pytest.raises(ValueError, match="participations="):
        upcycled_theorem_6_3(OBJECTIVE, KNOWN, num_examples=50, participations=-1)


def test_a_loss_of_no_slope_spends_nothing():
    run = {"num_examples": {0: 50}, "participations": {0: 1}, "delta": 0.1}
    assert epsilons_by_client(OUTPUT, replace(KNOWN, gradient_bound=0.0), **run)[0][1] == 0.0
