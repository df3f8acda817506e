"""Models of the experiments: each has an ``extractor`` and a ``head``, its last linear layer.

Those named ``-bn`` have BatchNorm before each ReLU, whose statistics cannot be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_ext.errors import InvalidValue


class HeadedModel(nn.Module):
    """The model ``head(extractor(x))``."""

    def __init__(self, extractor: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        logits: Tensor = self.head(self.extractor(x))
        return logits


def _linear(inputs: int, num_classes: int = 10) -> HeadedModel:
    return HeadedModel(nn.Flatten(), nn.Linear(inputs, num_classes))


def _perceptron(
    inputs: int, hidden: tuple[int, ...], num_classes: int = 10, *, batch_norm: bool = False
) -> HeadedModel:
    layers = nn.Sequential(nn.Flatten(), *_dense(inputs, *hidden, batch_norm=batch_norm))
    return HeadedModel(layers, nn.Linear(hidden[-1], num_classes))


def _convolutional(
    channels: tuple[int, ...],
    kernel: int,
    dense: tuple[int, ...],
    num_classes: int = 10,
    *,
    pool_last: bool = True,
    batch_norm: bool = False,
) -> HeadedModel:
    """Return convolutions without padding, each pooled 2×2, followed by dense layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
        layers += [nn.Conv2d(inputs, outputs, kernel), *norm, nn.ReLU(), nn.MaxPool2d(2)]
    if not pool_last:
        layers.pop()
    extractor = nn.Sequential(*layers, nn.Flatten(), *_dense(*dense, batch_norm=batch_norm))
    return HeadedModel(extractor, nn.Linear(dense[-1], num_classes))


def _dense(*widths: int, batch_norm: bool = False) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        norm = [nn.BatchNorm1d(outputs)] if batch_norm else []
        layers += [nn.Linear(inputs, outputs), *norm, nn.ReLU()]
    return layers


class BinaryLogistic(HeadedModel):
    """Logits (0, w·x) of two classes, with one weight per feature; the head may add a bias.

    Their cross-entropy is the logistic loss of w·x: a generalised linear model.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 2), the first of them 0."""
        return functional.pad(super().forward(x), (1, 0))


def _binary(name: str, inputs: int, bias: bool, num_classes: int = 2) -> BinaryLogistic:
    if num_classes != 2:
        raise InvalidValue(
            f"num_classes={num_classes!r}: expected 2, all that {name} can distinguish"
        )
    return BinaryLogistic(nn.Flatten(), nn.Linear(inputs, 1, bias=bias))


def tcga_brca_cox(num_classes: int = 1) -> HeadedModel:
    """Return a linear risk score of 39 features: 39 parameters, since Cox's loss ignores a bias.

    Raises
    ------
    ValueError
        ``num_classes`` is not 1.
    """
    if num_classes != 1:
        raise InvalidValue(f"num_classes={num_classes!r}: expected 1, as a risk is one number")
    return HeadedModel(nn.Flatten(), nn.Linear(39, 1, bias=False))


def creditcard_mlp(num_classes: int = 2) -> HeadedModel:
    """Return 30–64–32–classes for card transactions: 4,130 parameters with two classes."""
    return _perceptron(30, (64, 32), num_classes)


# These accept ``num_classes`` too; the default is 10, but 2 for logistic regression.

digits_mlp = partial(_perceptron, 64, (32,))
"""64–32–classes for 8×8 digits: 2,410 parameters."""
digits_logistic = partial(_linear, 64)
"""Softmax regression 64–classes for 8×8 digits: 650 parameters."""
mnist_mlp = partial(_perceptron, 784, (64, 32))
"""784–64–32–classes for 28×28 grey images: 52,650 parameters."""
mnist_logistic = partial(_linear, 784)
"""Softmax regression 784–classes for 28×28 grey images: 7,850 parameters."""
mnist_dnn = partial(_perceptron, 784, (100,))
"""784–100–classes for 28×28 grey images: 79,510 parameters."""
mnist_cnn = partial(_convolutional, (1, 8, 16), 5, (256, 62))
"""Two 5×5 convolutions (8, 16 channels) for 28×28 grey images: 19,988 parameters."""
mnist_cnn_32_64 = partial(_convolutional, (1, 32, 64), 5, (4096, 100), pool_last=False)
"""The CNN of DP-Ditto for 28×28 grey images: 462,806 parameters.

The paper leaves open the kernels (here 5×5) and the width between its dense layers (here 100).
"""
cifar10_cnn = partial(_convolutional, (3, 64, 128, 256), 3, (1024, 256, 128))
"""The CNN of DP²-FedSAM, Section 5.1: exactly 667,402 parameters."""
cifar10_lenet = partial(_convolutional, (3, 6, 16), 5, (400, 120, 84))
"""LeNet-5 for 32×32 colour images: 62,006 parameters."""
cifar10_cnn_32_64 = partial(_convolutional, (3, 32, 64), 5, (6400, 100), pool_last=False)
"""`mnist_cnn_32_64` for 32×32 colour images: 694,806 parameters."""
synthetic_logistic = partial(_linear, 20)
"""Softmax regression 20–classes for the synthetic devices: 210 parameters."""
binary_logistic = partial(_binary, "binary-logistic", 20, False)
"""Logistic regression on 20 features for two classes: its 20 parameters are w alone."""
heart_disease_logistic = partial(_binary, "heart-disease-logistic", 13, True)
"""Logistic regression on 13 features with a bias: 14 parameters."""
letters_mlp = partial(_perceptron, 784, (196,))
"""784–196–classes for 28×28 grey letters: 155,830 parameters."""

_MODELS: dict[str, Callable[..., HeadedModel]] = {
    "digits-mlp": digits_mlp,
    "digits-logistic": digits_logistic,
    "mnist-mlp": mnist_mlp,
    "mnist-logistic": mnist_logistic,
    "mnist-dnn": mnist_dnn,
    "mnist-cnn": mnist_cnn,
    "mnist-cnn-32-64": mnist_cnn_32_64,
    "cifar10-cnn": cifar10_cnn,
    "cifar10-lenet": cifar10_lenet,
    "cifar10-cnn-32-64": cifar10_cnn_32_64,
    "synthetic-logistic": synthetic_logistic,
    "binary-logistic": binary_logistic,
    "creditcard-mlp": creditcard_mlp,
    "heart-disease-logistic": heart_disease_logistic,
    "tcga-brca-cox": tcga_brca_cox,
    "letters-mlp": letters_mlp,
    **{
        f"{name}-bn": partial(model, batch_norm=True)
        for name, model in {
            "digits-mlp": digits_mlp,
            "mnist-mlp": mnist_mlp,
            "mnist-cnn": mnist_cnn,
            "cifar10-cnn": cifar10_cnn,
            "letters-mlp": letters_mlp,
        }.items()
    },
}


def build(name: str, *, num_classes: int | None = None) -> HeadedModel:
    """Build a model by name, by default with as many classes as its data set has.

    Raises
    ------
    ValueError
        The name is unknown (the message lists the known ones), or ``num_classes`` is below 1.
    """
    if name not in _MODELS:
        raise InvalidValue(f"model={name!r}: expected one of {', '.join(_MODELS)}")
    if num_classes is None:
        return _MODELS[name]()
    if num_classes < 1:
        raise InvalidValue(f"num_classes={num_classes!r}: expected at least 1")
    return _MODELS[name](num_classes)


def parameter_count(model: nn.Module) -> int:
    """Return the number of scalars in the parameters, trained or frozen."""
    return sum(torch.numel(p) for p in model.parameters())
