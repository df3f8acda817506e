"""Norms of gradients that are never written out; `test_dp_sgd` compares all forms with a loop."""

import pytest
import torch

from flower_ext.training.dp import per_example


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
    part = per_example.Products(slopes, inputs)
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
    part = per_example.Lookups(torch.cat([slopes, rest - slopes], dim=1), words, vocabulary)
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
        part = per_example.Rows(long)
    else:
        part = per_example.Products(torch.full((1, 1, 1), 2.0), long.unsqueeze(1))
        exact *= 4
    assert float(part.squares()) == pytest.approx(exact, rel=1e-5)
