"""The guarantees of Theorems 6.2 and 6.3 of Upcycled-FL, checked against real neighbours.

This module writes out the references from the paper, in NumPy and SciPy.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from flower_ext.data import Examples
from flower_ext.privacy import (
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    SeededNoise,
    clip,
)
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.theorems.upcycled_theorem import (
    clipped_model_sensitivity,
    upcycled_theorem_6_2,
    upcycled_theorem_6_3,
)
from flower_ext.training.local import newton
from tests.support.upcycled_problems import (
    KNOWN,
    OBJECTIVE,
    OUTPUT,
    delta_of_gaussians,
    epsilons_by_client,
)


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
    """Return the minimiser of a local problem, by SciPy."""
    solution = optimize.root(
        lambda w: gradient(loss, w, x, y, mu, anchor),
        anchor,
        jac=lambda w: hessian(loss, w, x, y, mu),
        tol=1e-13,
    ).x
    assert np.linalg.norm(gradient(loss, solution, x, y, mu, anchor)) < 1e-10
    return solution


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


def torch_minimiser(x, y, mu, anchor) -> np.ndarray:
    """Return the local model as a client of this package finds it."""

    def loss(params, features, labels):
        margins = labels * (features @ params["w"])
        mean = torch.nn.functional.softplus(-margins).mean()
        return mean + mu / 2 * (params["w"] - torch.from_numpy(anchor)).square().sum()

    examples = Examples(features=torch.from_numpy(x), targets=torch.from_numpy(y))
    solution = newton(loss, {"w": torch.from_numpy(anchor)}, examples, tolerance=1e-12)
    return solution["w"].numpy()


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
    model_with, model_without = (
        clip({"w": model}, perturbation.clipping_norm).value["w"] for model in models
    )
    moved = float(np.linalg.norm(model_with - model_without))
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
    """Yield pairs of neighbouring data sets, which differ in one record."""
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
    for minimiser_with, minimiser_without in problems(label):
        densities = [
            log_density(loss, points, data, rate, mu, anchor)
            for data in (minimiser_with, minimiser_without)
        ]
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
    minimisers = []
    for _ in range(draws):
        n = torch.from_numpy(perturbation.direction({"w": np.zeros(1)}, noise)["w"])

        def loss(params, features, labels, n=n):
            w = params["w"]
            data = torch.nn.functional.softplus(-labels * (features @ w)).mean()
            return data + mu / 2 * (w - anchor).square().sum() + (n * w).sum()

        start = {"w": torch.zeros(1, dtype=torch.float64)}
        minimisers.append(float(newton(loss, start, examples, tolerance=1e-11)["w"]))

    def chance(points, rate):
        slopes = [gradient(Logistic, np.array([w]), x, y, mu, np.array([anchor])) for w in points]
        return stats.laplace.sf(-np.array(slopes).ravel(), scale=1 / rate)

    assert stats.kstest(minimisers, lambda points: chance(points, rate)).pvalue > 1e-3
    for wrong in (1 / 3, 3.0):
        assert (
            stats.kstest(minimisers, lambda points, r=wrong * rate: chance(points, r)).pvalue < 1e-3
        )


PRECONDITIONS = [
    ({"generalised_linear": False}, "the loss is a generalised linear model"),
    ({"convex": False}, "the loss is convex"),
    ({"gradient_bound": math.inf}, "gradients of a record are bounded"),
    ({"curvature_bound": math.inf}, "curvature is bounded"),
    ({"feature_norm_bound": 1.01}, r"features have norm at most 1 \(at most 1.01\)"),
    ({"proximal_weight": 0.0}, "the proximal weight is above 0"),
]


@pytest.mark.parametrize(("unmet", "message"), PRECONDITIONS)
def test_each_precondition_of_theorem_6_3_is_checked_and_named(unmet, message):
    objective = replace(KNOWN, **unmet)
    with pytest.raises(PreconditionFailed, match=message):
        upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=1000, participations=1)
    with pytest.raises(PreconditionFailed, match=message):
        objective.least_examples()


def test_all_unmet_preconditions_are_named_at_once_and_met_ones_are_not():
    objective = replace(KNOWN, generalised_linear=False, feature_norm_bound=3.0)
    with pytest.raises(PreconditionFailed) as caught:
        upcycled_theorem_6_3(OBJECTIVE, objective, num_examples=2, participations=1)
    message = str(caught.value)
    for unmet in ("Theorem 6.3", "generalised linear", "at most 3", "u₂ ≤ 0.5 |D_i| μ (0.25"):
        assert unmet in message
    assert "convex" not in message
    assert "curvature is bounded" not in message


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
