import pytest
import torch

from flower_ext.training import check_shareable, split
from flower_ext.training.models import build, parameter_count

SHAPES = {
    "digits-mlp": (1, 8, 8),
    "mnist-mlp": (1, 28, 28),
    "mnist-cnn": (1, 28, 28),
    "cifar10-cnn": (3, 32, 32),
    "resnet18": (1, 28, 28),
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("digits-mlp", 2_410),
        ("mnist-mlp", 52_650),
        ("mnist-cnn", 19_988),
        ("cifar10-cnn", 667_402),
        ("resnet18", 11_181_642),
    ],
)
def test_models_have_their_exact_sizes(name, parameters):
    assert parameter_count(build(name)) == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_models_can_be_shared_and_have_a_head_that_is_their_last_layer(name):
    model = build(name, num_classes=7)
    check_shareable(model)
    shared, head = split(model.state_dict(), ["head"])
    assert set(head) == {"head.weight", "head.bias"}
    assert all(parameter.startswith("extractor.") for parameter in shared)
    images = torch.randn(2, *SHAPES[name])
    assert model(images).shape == (2, 7)
    torch.testing.assert_close(model(images), model.head(model.extractor(images)))


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="model='gpt': expected one of digits-mlp"):
        build("gpt")
    with pytest.raises(ValueError, match="num_classes=0: expected at least 1"):
        build("digits-mlp", num_classes=0)
