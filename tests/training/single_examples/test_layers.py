"""Norms of gradients that are never written out; `test_dp_sgd` compares all forms with a loop."""

import pytest
import torch

from flower_ext.training.single_examples import layers


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("left", [0.0, 1e-7, 1e-5, 1e-3, 1.0])
def test_what_cancels_does_not_pass_unclipped(left, scale):
    """Two places of one example have opposite gradients, up to a remainder."""
    random = torch.Generator().manual_seed(0)
    count, places, outputs, wide = 20, 16, 30, 200
    sides = torch.ones(places).index_fill(0, torch.arange(0, places, 2), -1.0).view(1, -1, 1)
    same = torch.randn(count, 1, wide, generator=random)
    inputs = scale * (sides * same + left * torch.randn(count, places, wide, generator=random))
    slopes = torch.randn(count, 1, outputs, generator=random).expand(-1, places, -1).clone()
    part = layers.Products(slopes, inputs)
    norms = part.squares().sqrt()
    for row in range(count):
        only = torch.eye(count)[row]
        assert part.total(only).double().norm() <= float(norms[row]) * (1 + 1e-6)
    exact = torch.bmm(slopes.double().mT, inputs.double()).flatten(1).norm(dim=1)
    assert (norms >= exact * (1 - 1e-6)).all()
    if left == 1.0:
        torch.testing.assert_close(norms.double(), exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("left", [0.0, 1e-7, 1e-3, 1.0])
def test_what_cancels_at_one_word_does_not_pass_unclipped(left):
    """Words occur twice with opposite slopes, up to a remainder."""
    draw = torch.Generator().manual_seed(0)
    count, width, vocabulary = 20, 8, 30
    words = torch.randint(vocabulary, (count, 6), generator=draw).repeat(1, 2)
    slopes = torch.randn(count, 6, width, generator=draw)
    rest = left * torch.randn(count, 6, width, generator=draw)
    part = layers.Lookups(torch.cat([slopes, rest - slopes], dim=1), words, vocabulary)
    norms = part.squares().sqrt()
    totals = [part.total(torch.eye(count)[row]) for row in range(count)]
    for norm, total in zip(norms, totals, strict=True):
        assert total.norm() <= float(norm) * (1 + 1e-6)
    if left == 1.0:
        written = torch.zeros(count, vocabulary, width, dtype=torch.float64)
        for row, places in enumerate(words):
            for place, word in enumerate(places):
                written[row, word] += part.slopes[row, place]
        torch.testing.assert_close(torch.stack(totals), written)
        exact = written.flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", ["rows", "products"])
def test_no_number_of_weights_makes_a_norm_too_small(kind):
    """A long sum of squares in single precision loses its last terms."""
    long = torch.full((1, 20_000_003), 0.7)
    exact = 0.7**2 * long.shape[1]
    if kind == "rows":
        part = layers.GradientRows(long)
    else:
        part = layers.Products(torch.full((1, 1, 1), 2.0), long.unsqueeze(1))
        exact *= 4
    assert float(part.squares()) == pytest.approx(exact, rel=1e-5)


def largest_total(part):
    """Return the largest norm of a gradient divided by its norm as `squares` gives it."""
    norms = part.squares().sqrt()
    every = torch.eye(len(norms), dtype=torch.float64)
    return max(float(part.total(one / norm).norm()) for one, norm in zip(every, norms, strict=True))


@pytest.mark.parametrize("places", [2, 3, 40])
@pytest.mark.parametrize("large", [1e4, 1e8, 1e12, 1e16])
@pytest.mark.parametrize("kind", ["products", "lookups"])
def test_in_float64_nothing_that_cancels_passes_unclipped(kind, large, places):
    """Terms of opposite sign leave a remainder that is far smaller than their squares' rounding."""
    draw = torch.Generator().manual_seed(0)
    count, width = 12, 64
    signs = torch.ones(places, dtype=torch.float64)
    signs[0] = 1.0 - places
    slopes = torch.randn(count, 1, width, generator=draw, dtype=torch.float64)
    slopes = slopes * signs.view(-1, 1)
    inputs = large * torch.randn(count, 1, width, generator=draw, dtype=torch.float64)
    inputs = inputs + torch.randn(count, places, width, generator=draw, dtype=torch.float64)
    if kind == "products":
        part = layers.Products(slopes, inputs)
    else:  # one row looked up with slopes whose sum is small
        words = torch.full((count, places), 3)
        part = layers.Lookups(inputs * signs.view(-1, 1), words, 50)
    assert largest_total(part) <= 1 + 1e-6


@pytest.mark.parametrize("exponent", [15, 18, 22, 30])
@pytest.mark.parametrize("places", [1, 2])
def test_squares_that_leave_the_range_of_single_precision_count(places, exponent):
    """Tiny slopes of huge inputs, and the other way round."""
    tiny = torch.full((1, places, 128), 1.3 * 10.0 ** (-exponent - 5))
    huge = torch.full((1, places, 4096), 1.1 * 10.0**exponent)
    exact = places * 1.43e-5 * (128 * 4096) ** 0.5
    for part in (layers.Products(tiny, huge), layers.Products(huge, tiny)):
        assert float(part.squares().sqrt()) == pytest.approx(exact, rel=1e-4)
        assert largest_total(part) <= 1 + 1e-5


@pytest.mark.parametrize("value", [1e-30, 1e-23, 1e-19, 1.0, 1e19, 1e30])
def test_rows_of_any_size_have_the_right_norm(value):
    part = layers.GradientRows(torch.full((2, 1000), value) * torch.tensor([[1.0], [0.0]]))
    norms = part.squares().sqrt()
    assert float(norms[0]) == pytest.approx(value * 1000**0.5, rel=1e-4)
    assert float(norms[1]) == 0.0
