"""Objective perturbation: the term that the client side adds to a local objective."""

import numpy as np
import pytest
import torch
from torch import nn

from flower_ext.federation.client.assignment import objective_terms
from flower_ext.privacy import ObjectivePerturbation, SecureNoise, SeededNoise


def term_of(params, rate, noise=None):
    protection = ObjectivePerturbation(rate=rate, least_examples=0)
    (term,) = objective_terms(params, 1, protection, noise or SecureNoise())
    return term


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


X = torch.tensor([[0.1, 0.2, 0.3], [-0.5, 0.4, 0.0], [0.3, -0.3, 0.6]]).double()
Y = torch.tensor([[1.0], [0.0], [1.0]]).double()


def strongly_convex_loss(net: nn.Module) -> torch.Tensor:
    squares = sum(p.square().sum() for p in net.parameters())
    return nn.functional.mse_loss(net(X), Y) + 0.5 * squares


def test_the_term_moves_the_optimum_until_the_slope_is_minus_the_noise():
    net = model()
    term = term_of(dict(net.named_parameters()), 1.5, SeededNoise(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        (strongly_convex_loss(net) + term(dict(net.named_parameters()))).backward()
        optimizer.step()
    optimizer.zero_grad()
    strongly_convex_loss(net).backward()
    like = {name: p.detach().numpy() for name, p in net.named_parameters()}
    noise = ObjectivePerturbation(rate=1.5).direction(like, SeededNoise(3))
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.grad.numpy(), -noise[name], atol=1e-8)
    assert sum(float(np.abs(part).sum()) for part in noise.values()) > 0.1


def test_a_term_stays_constant_and_the_next_term_differs():
    params = dict(model().named_parameters())
    first, second = (term_of(params, 1.0) for _ in range(2))
    assert float(first(params)) == float(first(params))
    assert float(first(params)) != float(second(params))


def test_a_term_has_the_precision_of_the_parameters_and_needs_floats():
    term = term_of({"w": torch.zeros(4, 2)}, 1.0, SeededNoise(1))
    assert term.direction["w"].dtype == torch.float32
    assert term.direction["w"].shape == (4, 2)
    with pytest.raises(TypeError, match="'steps' has dtype"):
        term_of({"steps": torch.tensor([3])}, 1.0)
