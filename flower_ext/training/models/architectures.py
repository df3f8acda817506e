"""Models of the experiments: each has an ``extractor`` and a ``head``, its last linear layer.

Models whose names end with ``-bn`` have a BatchNorm layer before each ReLU. The running statistics
of these layers must not be shared.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from flower_ext.checks import require_at_least_one, require_one_of
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
    """Return a model of convolutions without padding, followed by dense layers.

    A 2×2 pooling follows each convolution; without ``pool_last``, the last one has none.
    ``channels`` and ``dense`` are the widths of the layers, from input to output.
    """
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
    """Logistic regression with the logits (0, w·x) of two classes. A bias may be added to w·x.

    w has one weight per feature. The cross-entropy of these logits is the logistic loss of w·x.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 2). The logit of class 0 is always 0."""
        return functional.pad(super().forward(x), (1, 0))


def _binary(name: str, inputs: int, bias: bool, num_classes: int = 2) -> BinaryLogistic:
    if num_classes != 2:
        raise InvalidValue(f"num_classes={num_classes!r}: expected 2, because {name} is binary")
    return BinaryLogistic(nn.Flatten(), nn.Linear(inputs, 1, bias=bias))


def _risk(inputs: int, num_classes: int = 1) -> HeadedModel:
    if num_classes != 1:
        raise InvalidValue(
            f"num_classes={num_classes!r}: expected 1, because a survival model has one output, "
            "the risk; leave num_classes out"
        )
    return HeadedModel(nn.Flatten(), nn.Linear(inputs, 1, bias=False))  # Cox's loss ignores a bias


_NORMED: dict[str, Callable[..., HeadedModel]] = {
    "digits-mlp": partial(_perceptron, 64, (32,)),
    "mnist-mlp": partial(_perceptron, 784, (64, 32)),
    "mnist-cnn": partial(_convolutional, (1, 8, 16), 5, (256, 62)),
    # DP²-FedSAM, Section 5.1: exactly 667,402 parameters.
    "cifar10-cnn": partial(_convolutional, (3, 64, 128, 256), 3, (1024, 256, 128)),
    "letters-mlp": partial(_perceptron, 784, (196,)),
}
_MODELS: dict[str, Callable[..., HeadedModel]] = {
    **_NORMED,
    **{f"{name}-bn": partial(model, batch_norm=True) for name, model in _NORMED.items()},
    "mnist-dnn": partial(_perceptron, 784, (100,)),
    # DP-Ditto leaves open the kernels (here 5×5) and the width between its dense layers (here 100).
    "mnist-cnn-32-64": partial(_convolutional, (1, 32, 64), 5, (4096, 100), pool_last=False),
    "cifar10-cnn-32-64": partial(_convolutional, (3, 32, 64), 5, (6400, 100), pool_last=False),
    "cifar10-lenet": partial(_convolutional, (3, 6, 16), 5, (400, 120, 84)),  # LeNet-5
    "creditcard-mlp": partial(_perceptron, 30, (64, 32), num_classes=2),
    "digits-logistic": partial(_linear, 64),
    "mnist-logistic": partial(_linear, 784),
    "synthetic-logistic": partial(_linear, 20),
    "binary-logistic": partial(_binary, "binary-logistic", 20, False),
    "heart-disease-logistic": partial(_binary, "heart-disease-logistic", 13, True),
    "tcga-brca-cox": partial(_risk, 39),
}
"""Functions that build the models, by name; each takes ``num_classes``."""


def build(name: str, *, num_classes: int | None = None) -> HeadedModel:
    """Build a model by name, by default with as many classes as its data set has.

    Raises
    ------
    ValueError
        The name is unknown (the message lists the known ones), or ``num_classes`` is below 1 or
        does not suit the model.
    """
    require_one_of("model", name, [*_MODELS])
    if num_classes is None:
        return _MODELS[name]()
    require_at_least_one("num_classes", num_classes)
    return _MODELS[name](num_classes=num_classes)
