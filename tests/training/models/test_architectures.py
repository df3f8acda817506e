"""Models have the layers, sizes and losses of their papers."""

import pytest
import torch
from torch.nn import functional

from flower_ext.training import UnshareableModel, check_shareable, matches
from flower_ext.training.models import build

SHAPES = {
    "digits-mlp": (1, 8, 8),
    "mnist-mlp": (1, 28, 28),
    "mnist-cnn": (1, 28, 28),
    "mnist-dnn": (1, 28, 28),
    "mnist-cnn-32-64": (1, 28, 28),
    "cifar10-cnn": (3, 32, 32),
    "cifar10-lenet": (3, 32, 32),
    "cifar10-cnn-32-64": (3, 32, 32),
    "letters-mlp": (1, 28, 28),
    "creditcard-mlp": (30,),
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("digits-mlp", 2_410),
        ("digits-logistic", 650),
        ("mnist-mlp", 52_650),
        ("mnist-logistic", 7_850),
        ("mnist-dnn", 79_510),
        ("mnist-cnn", 19_988),
        ("mnist-cnn-32-64", 462_806),
        ("cifar10-cnn", 667_402),
        ("cifar10-lenet", 62_006),
        ("cifar10-cnn-32-64", 694_806),
        ("synthetic-logistic", 210),
        ("binary-logistic", 20),
        ("creditcard-mlp", 4_130),
        ("heart-disease-logistic", 14),
        ("tcga-brca-cox", 39),
        ("letters-mlp", 155_830),
        ("digits-mlp-bn", 2_410 + 2 * 32),
        ("mnist-mlp-bn", 52_650 + 2 * 96),
        ("mnist-cnn-bn", 19_988 + 2 * 86),
        ("cifar10-cnn-bn", 667_402 + 2 * 832),
        ("letters-mlp-bn", 155_830 + 2 * 196),
    ],
)
def test_models_have_their_exact_sizes(name, parameters):
    assert sum(p.numel() for p in build(name).parameters()) == parameters


@pytest.mark.parametrize("name", SHAPES)
def test_models_can_be_shared_and_their_last_layer_is_the_head(name):
    model = build(name, num_classes=7)
    check_shareable(model)
    head = {name: p for name, p in model.state_dict().items() if matches(name, ["head"])}
    shared = model.state_dict().keys() - head
    assert set(head) == {"head.weight", "head.bias"}
    assert all(parameter.startswith("extractor.") for parameter in shared)
    images = torch.randn(2, *SHAPES[name])
    assert model(images).shape == (2, 7)
    torch.testing.assert_close(model(images), model.head(model.extractor(images)))


def test_batch_normalisation_precedes_each_relu_and_is_not_shared():
    model = build("mnist-cnn-bn")
    kinds = [type(layer).__name__ for layer in model.extractor]
    after = [kinds[at + 1] for at, kind in enumerate(kinds) if kind.startswith("BatchNorm")]
    assert after == ["ReLU"] * kinds.count("ReLU")
    with pytest.raises(UnshareableModel, match="'extractor.1'"):
        check_shareable(model)


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="model='gpt': expected one of digits-mlp"):
        build("gpt")
    with pytest.raises(ValueError, match="num_classes=0: expected an integer >= 1"):
        build("digits-mlp", num_classes=0)


def test_softmax_regression_is_one_linear_layer():
    model = build("synthetic-logistic", num_classes=3)
    check_shareable(model)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "head.weight": (3, 20),
        "head.bias": (3,),
    }
    x = torch.randn(5, 20)
    torch.testing.assert_close(model(x), x @ model.head.weight.T + model.head.bias)


def test_binary_logistic_regression_has_the_logistic_loss_without_a_bias():
    model = build("binary-logistic")
    check_shareable(model)
    ((name, weight),) = model.named_parameters()
    assert (name, weight.shape) == ("head.weight", (1, 20))
    x, targets = torch.randn(64, 20), torch.arange(64) % 2
    product = x @ weight[0]
    logits = model(x)
    assert torch.equal(logits[:, 0], torch.zeros(64))
    torch.testing.assert_close(logits[:, 1], product)
    loss = functional.softplus(-(2 * targets - 1) * product).mean()
    torch.testing.assert_close(functional.cross_entropy(logits, targets), loss)
    assert torch.equal(logits.argmax(dim=1), (product > 0).long())
    with pytest.raises(ValueError, match="num_classes=10: expected 2"):
        build("binary-logistic", num_classes=10)


def test_the_medical_models_are_one_linear_layer():
    x = torch.randn(6, 13)
    logistic = build("heart-disease-logistic")
    check_shareable(logistic)
    torch.testing.assert_close(logistic(x)[:, 1], x @ logistic.head.weight[0] + logistic.head.bias)
    assert torch.equal(logistic(x)[:, 0], torch.zeros(6))
    cox = build("tcga-brca-cox")
    check_shareable(cox)
    assert [name for name, _ in cox.named_parameters()] == ["head.weight"]
    assert cox(torch.randn(6, 39)).shape == (6, 1)
    for name, classes in (("heart-disease-logistic", 3), ("tcga-brca-cox", 2)):
        with pytest.raises(ValueError, match=f"num_classes={classes}: expected"):
            build(name, num_classes=classes)


def test_by_default_a_model_has_the_classes_of_its_data():
    assert build("creditcard-mlp").head.out_features == 2
    assert build("letters-mlp").head.out_features == 10
    assert build("creditcard-mlp", num_classes=3).head.out_features == 3
