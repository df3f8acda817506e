import pytest
import torch
from torch import nn

from flower_ext.training import UnshareableModel, check_shareable, replace_batch_norm


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16, 2))


def test_batch_norm_in_the_shared_part_is_refused_with_its_name_and_the_fix():
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


def test_any_other_buffer_is_refused():
    layer = nn.Linear(2, 2)
    layer.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UnshareableModel, match="buffers \\['seen'\\]"):
        check_shareable(nn.Sequential(layer))


def test_statistics_that_opacus_knows_are_refused_with_its_advice():
    layer = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    with pytest.raises(UnshareableModel, match="layer '0'.*buffers.*tracking running stats"):
        check_shareable(nn.Sequential(layer))
