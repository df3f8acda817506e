"""Newton's method finds the minimiser of a local problem to its tolerance."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, special

from flower_ext.data import Examples
from flower_ext.training.local import MOST_PARAMETERS, NotConverged, newton

MU = 0.2


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def records(count: int = 40, features: int = 3, seed: int = 0, dtype=torch.float64) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator).to(dtype)
    y = torch.sign(x[:, 0] + torch.randn(count, generator=generator)).double()
    return Examples(features=x, targets=y)


def logistic(params, x, y):
    """Return binary logistic regression with a bias, and (μ/2)‖·‖² over both."""
    margins = y * (x @ params["weight"] + params["bias"])
    squares = params["weight"].square().sum() + params["bias"].square().sum()
    return torch.nn.functional.softplus(-margins).mean() + MU / 2 * squares


def zero() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(3).double(), "bias": torch.zeros(()).double()}


def scipy_minimiser(examples: Examples) -> np.ndarray:
    """Return the minimiser of the logistic problem, by SciPy."""
    x = np.column_stack([examples.features.numpy(), np.ones(len(examples))])
    y = examples.targets.numpy()

    def slope(w):
        return x.T @ (-y * special.expit(-y * (x @ w))) / len(y) + MU * w

    return optimize.root(slope, np.zeros(4), tol=1e-13).x


def flat(params) -> np.ndarray:
    return np.append(params["weight"].numpy(), params["bias"].numpy())


def test_ridge_regression_has_its_closed_form():
    data = records()

    def loss(params, x, y):
        return (x @ params["w"] - y).square().mean() / 2 + MU / 2 * params["w"].square().sum()

    minimiser = newton(loss, {"w": vector(5.0, -7.0, 0.0)}, data, tolerance=1e-12)["w"]
    x, y = data.features, data.targets
    exact = torch.linalg.solve(x.T @ x / len(y) + MU * torch.eye(3).double(), x.T @ y / len(y))
    torch.testing.assert_close(minimiser, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("far", [0.0, 30.0, -300.0])
def test_the_minimiser_of_a_logistic_problem_is_found_from_anywhere(seed, far):
    data = records(seed=seed)
    start = {name: value + far for name, value in zero().items()}
    minimiser = newton(logistic, start, data, tolerance=1e-11)
    np.testing.assert_allclose(flat(minimiser), scipy_minimiser(data), atol=1e-9)
    assert {name: value.shape for name, value in minimiser.items()} == {"weight": (3,), "bias": ()}
    assert {value.dtype for value in minimiser.values()} == {torch.float64}


def test_steps_that_would_overshoot_are_shortened():
    """√(1 + w²) + (μ/2) w² from w = 3: a full Newton step would go to about −w³."""
    data = records()

    def loss(params, x, y):
        return (1 + params["w"].square()).sqrt().sum() + 0.0005 * params["w"].square().sum()

    def full_step(w):
        slope = w / math.sqrt(1 + w**2) + 0.001 * w
        return w - slope / ((1 + w**2) ** -1.5 + 0.001)

    assert abs(full_step(3.0)) > 3 * 3.0
    minimiser = newton(loss, {"w": vector(3.0, -40.0)}, data, tolerance=1e-12)
    torch.testing.assert_close(minimiser["w"], vector(0.0, 0.0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-4, 1e-10])
def test_the_gradient_and_the_minimiser_are_within_the_tolerance(tolerance):
    """`LocalObjective.distance_to_minimiser` needs this: a μ-strongly convex objective."""
    data = records()
    start = {"weight": vector(2.0, -1.0, 3.0), "bias": vector(1.0)[0]}
    minimiser = newton(logistic, start, data, tolerance=tolerance)
    leaves = {name: value.clone().requires_grad_() for name, value in minimiser.items()}
    logistic(leaves, data.features, data.targets).backward()
    slope = math.sqrt(sum(float(leaf.grad.square().sum()) for leaf in leaves.values()))
    assert slope <= tolerance * (1 + 1e-9)
    assert np.linalg.norm(flat(minimiser) - scipy_minimiser(data)) <= tolerance / MU + 1e-9


def test_a_start_that_is_good_enough_is_returned_as_it_is():
    data, start = records(), {"weight": vector(0.1, 0.2, 0.3), "bias": vector(0.4)[0]}
    minimiser = newton(logistic, start, data, tolerance=100.0)
    torch.testing.assert_close(minimiser, start, rtol=0, atol=0)


def test_the_start_is_left_as_it_was():
    start = zero()
    minimiser = newton(logistic, start, records(), tolerance=1e-8)
    assert all(torch.equal(start[name], zero()[name]) for name in start)
    assert not torch.equal(minimiser["weight"], start["weight"])


def test_features_in_single_precision_are_taken_in_double():
    data = records(dtype=torch.float32)
    wide = Examples(features=data.features.double(), targets=data.targets)
    minimiser = newton(logistic, zero(), data, tolerance=1e-11)
    torch.testing.assert_close(minimiser, newton(logistic, zero(), wide, tolerance=1e-11))


def test_integer_features_stay_indices():
    """The model is a mean for each of two words: 1 and 4, pulled to zero by the regulariser."""
    words = Examples(features=torch.tensor([0, 1, 1]), targets=vector(1.0, 4.0, 4.0))

    def loss(params, x, y):
        return (params["table"][x] - y).square().sum() / 2 + params["table"].square().sum() / 2

    minimiser = newton(loss, {"table": vector(0.0, 0.0)}, words, tolerance=1e-12)
    torch.testing.assert_close(minimiser["table"], vector(1 / 2, 8 / 3))


@pytest.mark.parametrize(
    "objective",
    [
        lambda w: w.sum(),
        lambda w: w[0] ** 2 - w[1] ** 2,
        lambda w: -w.square().sum(),
        lambda w: (w[0] - w[1]) ** 2 + w.sum(),
        lambda w: w.log().sum(),  # not a number at the start
    ],
    ids=["linear", "saddle", "concave", "flat direction", "undefined"],
)
def test_an_objective_without_strong_convexity_fails_with_a_remedy(
    objective,
):
    with pytest.raises(NotConverged, match="set proximal_weight above 0"):
        newton(
            lambda params, x, y: objective(params["w"]),
            {"w": vector(-1.0, 2.0)},
            records(),
            tolerance=1e-9,
        )


def test_a_step_out_of_the_domain_of_the_loss_is_shortened():
    minimiser = newton(
        lambda params, x, y: (params["w"] - params["w"].log()).sum(),
        {"w": vector(5.0)},  # a whole step leads to -15, where the logarithm is not a number
        records(),
        tolerance=1e-9,
    )
    assert minimiser["w"].item() == pytest.approx(1.0)


def test_a_tolerance_below_what_floats_reach_ends_and_is_named():
    with pytest.raises(NotConverged, match="tolerance=1e-300"):
        newton(logistic, zero(), records(), tolerance=1e-300)


def test_too_many_parameters_are_refused_before_anything_is_computed():
    def never(params, x, y):
        raise AssertionError

    start = {"a": torch.zeros(MOST_PARAMETERS).double(), "b": torch.zeros(1).double()}
    with pytest.raises(ValueError, match=f"{MOST_PARAMETERS + 1} parameters.*train by SGD"):
        newton(never, start, records(), tolerance=1e-3)
