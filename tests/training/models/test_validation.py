"""Models with layers that mix examples are refused, and fixed on request."""

import pytest
import torch
from torch import nn

from flower_ext.training import UnshareableModel, check_shareable, replace_batch_norm


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16, 2))


def test_batch_norm_in_the_shared_part_is_refused_with_the_fix():
    with pytest.raises(UnshareableModel, match=r"layer '1' \(BatchNorm2d\).*GroupNorm"):
        check_shareable(network())


def test_personal_batch_norm_is_allowed():
    check_shareable(network(), personal=("1",))


def test_the_fix_makes_a_model_shareable_that_computes_the_same_shapes():
    fixed = replace_batch_norm(network())
    check_shareable(fixed)
    assert fixed(torch.randn(3, 1, 3, 3)).shape == (3, 2)


class OwnNorm(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, affine=False), OwnNorm(4)])
def test_the_fix_finds_batch_norms_that_opacus_passes_over(layer):
    check_shareable(replace_batch_norm(nn.Sequential(layer)))
    check_shareable(replace_batch_norm(layer))


def test_the_fix_leaves_recurrent_layers_and_the_given_model_as_they_are():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LSTM(4, 5))
    fixed = replace_batch_norm(model)
    assert [type(layer) for layer in fixed] == [nn.GroupNorm, nn.LSTM]
    assert type(model[0]) is nn.BatchNorm1d


def flat(width):
    return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 2)), (width,)


def pooled(channels):
    layers = nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(channels, 2)), (channels, 5, 5)


def shrunk(channels):
    return nn.Sequential(nn.BatchNorm3d(channels), nn.Flatten()), (channels, 1, 1, 1)


def times(channels):
    return nn.Sequential(nn.BatchNorm1d(channels), nn.Flatten()), (channels, 7)


@pytest.mark.parametrize("width", [4, 8, 12, 16, 20, 32, 33, 64, 96, 512])
@pytest.mark.parametrize("build", [flat, pooled, shrunk, times])
def test_no_fixed_norm_hides_what_distinguishes_examples(build, width):
    """Three numbers of a group have two degrees of freedom, and keep one."""
    model, shape = build(width)
    x = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0))
    fixed = replace_batch_norm(model).requires_grad_(False)
    assert fixed(x).var(dim=0).max() > 1e-4
    one_by_one = torch.cat([fixed(example) for example in x.split(1)])
    torch.testing.assert_close(one_by_one, fixed(x))


@pytest.mark.parametrize("width", [3, 8, 32, 64])
def test_flat_features_are_normalised_as_by_layer_norm(width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    fixed = replace_batch_norm(nn.Sequential(nn.BatchNorm1d(width)))
    torch.testing.assert_close(fixed(x), nn.LayerNorm(width)(x))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2), nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1)]
)
def test_too_few_channels_for_norms_within_examples_are_refused_by_name(layer):
    with pytest.raises(ValueError, match=r"layer '1' .*num_features=\d: expected at least"):
        replace_batch_norm(nn.Sequential(nn.Identity(), layer))


def test_a_fixed_norm_keeps_everything_of_its_layer_but_its_statistics():
    layer = nn.BatchNorm2d(16, eps=0.25, dtype=torch.float64).eval()
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias).requires_grad_(False)
    model = nn.Sequential(layer, nn.BatchNorm1d(4, affine=False, eps=0.5), layer)
    fixed = replace_batch_norm(model)
    norm = fixed[0]
    assert (norm.num_groups, norm.num_channels, norm.eps) == (4, 16, 0.25)
    assert (norm.training, fixed[1].training, fixed[1].eps) == (False, True, 0.5)
    assert fixed[2] is norm
    for leaf in ("weight", "bias"):
        ours, theirs = getattr(norm, leaf), getattr(layer, leaf)
        assert torch.equal(ours, theirs)
        assert ours is not theirs
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
        assert getattr(fixed[1], leaf) is None
    assert [*fixed.state_dict()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert type(model[0]) is type(model[2]) is nn.BatchNorm2d


def test_any_other_buffer_is_refused():
    layer = nn.Linear(2, 2)
    layer.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UnshareableModel, match="buffers \\['seen'\\]"):
        check_shareable(nn.Sequential(layer))


def test_statistics_that_opacus_knows_are_refused_with_its_advice():
    layer = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    with pytest.raises(UnshareableModel, match="layer '0'.*buffers.*tracking running stats"):
        check_shareable(nn.Sequential(layer))
