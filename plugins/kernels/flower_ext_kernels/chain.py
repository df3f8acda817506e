"""Recognition of models that are a chain of known layers, by their modules or by a trace."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from flower_ext.training.models.dropout import LEVELS, levels_dropped
from flower_ext_kernels.layer_table import (
    AVERAGE_POOL,
    CHANNELS,
    CONVOLUTION,
    DENSE,
    DROPOUT,
    FILTERS,
    HEIGHT,
    IDENTITY,
    IMAGE_NORM,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    MAX_POOL,
    NORM,
    OUT_HEIGHT,
    OUT_WIDTH,
    PADDING_HEIGHT,
    PADDING_WIDTH,
    RELU,
    SIGMOID,
    STRIDE_HEIGHT,
    STRIDE_WIDTH,
    TANH,
    TRANSPOSE,
    WIDTH,
)

_ACTIVATIONS: Mapping[Any, int] = {
    nn.Identity: IDENTITY,
    **dict.fromkeys((nn.ReLU, torch.relu, functional.relu, "relu"), RELU),
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh"), TANH),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid"), SIGMOID),
}
_IMAGE_DIMENSIONS = 3
"""An image has the dimensions channels, height and width."""


@dataclass(frozen=True)
class Window:
    """The window of a convolution or a pooling, which moves over an image.

    Pairs are (height, width). ``padding`` says how many zeros surround the image on each side.
    """

    channels: int
    image_size: tuple[int, int]
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the images after the layer."""
        height, width = (
            (size + 2 * padding - kernel) // stride + 1
            for size, padding, kernel, stride in zip(
                self.image_size, self.padding, self.kernel, self.stride, strict=True
            )
        )
        return height, width

    @property
    def padded_size(self) -> int:
        """Number of values in an image with its padding."""
        height, width = (
            size + 2 * padding for size, padding in zip(self.image_size, self.padding, strict=True)
        )
        return self.channels * height * width

    def write_columns(self, row: np.ndarray) -> None:
        """Write this window to its columns of `layer_table`, in the row of its layer."""
        row[CHANNELS], row[FILTERS] = self.channels, self.filters
        row[HEIGHT], row[WIDTH] = self.image_size
        row[OUT_HEIGHT], row[OUT_WIDTH] = self.output_size
        row[KERNEL_HEIGHT], row[KERNEL_WIDTH] = self.kernel
        row[STRIDE_HEIGHT], row[STRIDE_WIDTH] = self.stride
        row[PADDING_HEIGHT], row[PADDING_WIDTH] = self.padding


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a chain. Its ``kind`` is one of those in `layer_table`.

    `layer_table` also explains ``groups`` and ``setting``. ``inputs`` and ``outputs`` count the
    numbers of one example before and after the layer.
    """

    module: nn.Module
    name: str
    kind: int
    inputs: int
    outputs: int
    groups: int = 1
    setting: int = 0
    activation: int = IDENTITY
    window: Window | None = None

    @property
    def scratch_size(self) -> int:
        """Number of values in the working memory that the layer's passes need for one example."""
        if self.window is None:
            return 0
        window = self.window
        weights = math.prod(window.kernel) * window.channels * window.filters
        return weights + window.padded_size + 3 * window.channels


def recognise_chain(model: nn.Module, shape: torch.Size) -> list[Layer]:
    """Return the layers of a model in order.

    The list is empty if the model is not a chain, if its outputs for one example are not a row of
    numbers, or if machine code cannot run one of its layers.

    Parameters
    ----------
    shape : torch.Size
        Shape of one example: a row of features, or an image (channels, height, width) if the first
        layer works on images. `nn.Flatten` may come first.
    """
    layers: list[Layer] = []
    example_shape = shape
    for name, operation in _flatten_sequential(model) or _trace(model):
        dimensions = len(example_shape)
        activation = _ACTIVATIONS.get(type(operation) if name else operation)
        if (numbers := _flattened_size(operation, example_shape)) is not None:
            layers += _transposition(example_shape, back=True) if layers else []
            example_shape = torch.Size([numbers])
        elif activation is not None and layers and layers[-1].activation == IDENTITY:
            layers[-1] = replace(layers[-1], activation=activation)
        elif dimensions == 1 and (
            layer := _recognise_row_layer(operation, name, example_shape.numel())
        ):
            layers.append(layer)
            example_shape = torch.Size([layer.outputs])
        elif dimensions == _IMAGE_DIMENSIONS and (
            layer := _recognise_image_layer(operation, name, example_shape)
        ):
            layers += [*([] if layers else _transposition(example_shape)), layer]
            assert layer.window is not None
            example_shape = torch.Size([layer.window.filters, *layer.window.output_size])
        else:
            return []
    return _move_relu_behind_pooling(layers) if len(example_shape) == 1 else []


def _flattened_size(operation: object, shape: torch.Size) -> int | None:
    """Return the size of an example if ``operation`` flattens it to one row, else None."""
    if isinstance(operation, nn.Flatten):
        flattens = (operation.start_dim, operation.end_dim) == (1, -1)
    else:
        flattens = operation == torch.Size([shape.numel()])
    return shape.numel() if flattens else None


def _transposition(shape: torch.Size, *, back: bool = False) -> list[Layer]:
    """Return a list with the layer that moves an image's channels from first to last dimension.

    If ``back`` is True, the layer moves them from the last dimension to the first. The list is
    empty if ``shape`` is not an image. It is also empty if the image has one channel or one pixel,
    because a transposition would move no number.
    """
    size, channels = shape.numel(), shape[0]
    if len(shape) != _IMAGE_DIMENSIONS or channels in (1, size):
        return []
    transposition = Layer(
        module=nn.Identity(),
        name="",
        kind=TRANSPOSE,
        inputs=size,
        outputs=size,
        setting=size // channels if back else channels,
    )
    return [transposition]


def _move_relu_behind_pooling(layers: list[Layer]) -> list[Layer]:
    """Return the layers, with every ReLU that precedes a max pooling moved behind the pooling.

    Values and gradients stay the same, and the ReLU handles a fraction of the numbers.
    """
    layers = [*layers]
    for number, (layer, following) in enumerate(pairwise(layers)):
        pools = following.kind == MAX_POOL and following.activation in (IDENTITY, RELU)
        if pools and layer.activation == RELU:
            layers[number] = replace(layer, activation=IDENTITY)
            layers[number + 1] = replace(following, activation=RELU)
    return layers


def _flatten_sequential(module: nn.Module, name: str = "") -> list[tuple[str, Any]]:
    """Return the names and modules of an `nn.Sequential`, in order; for other models, nothing.

    A sequence needs no trace. Each message may bring a new model, and a trace would take longer
    than the training of the model.
    """
    if type(module) is not nn.Sequential:
        return [(name, module)] if name else []
    return [
        named
        for leaf, child in module._modules.items()  # may contain the same module twice
        for named in _flatten_sequential(child, f"{name}.{leaf}".removeprefix("."))
    ]


def _trace(model: nn.Module) -> list[tuple[str, Any]]:
    """Trace a model, and return the names and operations of its chain, in order.

    None stands for an operation that no chain may have. The result is empty if PyTorch cannot
    trace the model.
    """
    try:
        nodes = list(fx.Tracer().trace(model).nodes)
    except Exception:  # a forward method may raise anything for a symbol
        return []
    operations: list[tuple[str, Any]] = []
    for previous, node in pairwise(nodes):
        if node.all_input_nodes != [previous]:
            return [("", None)]
        if node.op == "output":
            return operations
        operations.append(_describe_node(node, model))
    return [("", None)]


def _describe_node(node: fx.Node, model: nn.Module) -> tuple[str, Any]:
    """Return the name and the operation of one node of a trace.

    The operation is a module, a function, or the shape that a view gives to an example. It is None
    if no chain may have it.
    """
    more, settings = node.args[1:], node.kwargs
    if node.target is functional.max_pool2d and len(more) == 1:
        return node.name, nn.MaxPool2d(*more, **settings)  # type: ignore[arg-type]
    if node.target in (torch.flatten, "flatten") and more == (1,) and not settings:
        return node.name, nn.Flatten()
    if node.target in ("view", "reshape") and len(more) == 2 and more[0] == -1:
        return node.name, torch.Size([more[1]]) if isinstance(more[1], int) else None
    if more or set(settings) - {"inplace"}:
        return "", None
    if node.op == "call_module":
        return str(node.target), model.get_submodule(str(node.target))
    return "", node.target


def _recognise_row_layer(module: Any, name: str, width: int) -> Layer | None:
    """Return the layer for a module on rows of ``width`` numbers; None if no machine code fits."""
    if type(module) is nn.Linear:
        inputs, outputs = module.in_features, module.out_features
        return Layer(module=module, name=name, kind=DENSE, inputs=inputs, outputs=outputs)
    kind, groups, setting = DROPOUT, 1, 0
    if type(module) is nn.Dropout and module.training:
        setting = levels_dropped(module.p)
        known = 0 < setting < LEVELS
    elif type(module) in (nn.GroupNorm, nn.LayerNorm):
        grouped = isinstance(module, nn.GroupNorm)
        kind, groups = NORM, module.num_groups if grouped else 1
        normalised_shape = (module.num_channels,) if grouped else module.normalized_shape
        setting, known = _inverse_epsilon(module.eps)
        known = known and normalised_shape == (width,)
    else:
        return None
    layer = Layer(
        module=module,
        name=name,
        kind=kind,
        inputs=width,
        outputs=width,
        groups=groups,
        setting=setting,
    )
    return layer if known else None


@dataclass(frozen=True, kw_only=True)
class _ImageSettings:
    """Settings of a module as a layer on images.

    ``kernel``, ``stride`` and ``padding`` are as in PyTorch's modules. ``filters`` is None if the
    layer does not change the number of channels.
    """

    kind: int
    kernel: object = 1
    stride: object = 1
    padding: object = 0
    filters: int | None = None
    groups: int = 1
    setting: int = 0


def _convolution(module: nn.Conv2d, shape: Sequence[int]) -> _ImageSettings | None:
    if module.groups != 1 or module.padding_mode != "zeros" or module.in_channels != shape[0]:
        return None
    if _pair(module.dilation) != (1, 1):
        return None
    return _ImageSettings(
        kind=CONVOLUTION,
        kernel=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        filters=module.out_channels,
    )


def _max_pooling(module: nn.MaxPool2d, shape: Sequence[int]) -> _ImageSettings | None:
    if module.ceil_mode or module.return_indices or _pair(module.padding) != (0, 0):
        return None
    if _pair(module.dilation) != (1, 1):
        return None
    return _ImageSettings(kind=MAX_POOL, kernel=module.kernel_size, stride=module.stride)


def _average_pooling(module: nn.AvgPool2d, shape: Sequence[int]) -> _ImageSettings | None:
    if module.ceil_mode or module.divisor_override is not None or _pair(module.padding) != (0, 0):
        return None
    return _ImageSettings(kind=AVERAGE_POOL, kernel=module.kernel_size, stride=module.stride)


def _global_average_pooling(
    module: nn.AdaptiveAvgPool2d, shape: Sequence[int]
) -> _ImageSettings | None:
    if module.output_size not in (1, (1, 1)):
        return None
    return _ImageSettings(kind=AVERAGE_POOL, kernel=tuple(shape[1:]))


def _image_norm(module: nn.GroupNorm, shape: Sequence[int]) -> _ImageSettings | None:
    setting, exact = _inverse_epsilon(module.eps)
    if not exact or module.num_channels != shape[0]:
        return None
    return _ImageSettings(kind=IMAGE_NORM, groups=module.num_groups, setting=setting)


_IMAGE_MODULES: Mapping[type, Callable[..., _ImageSettings | None]] = {
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _max_pooling,
    nn.AvgPool2d: _average_pooling,
    nn.AdaptiveAvgPool2d: _global_average_pooling,
    nn.GroupNorm: _image_norm,
}
"""Functions that read a module's settings, or return None if machine code does not support them."""


def _recognise_image_layer(module: Any, name: str, shape: Sequence[int]) -> Layer | None:
    """Return the layer for a module on images of ``shape``; None if no machine code fits."""
    read_settings = _IMAGE_MODULES.get(type(module))
    if read_settings is None or (settings := read_settings(module, shape)) is None:
        return None
    kernel, stride, padding = map(_pair, (settings.kernel, settings.stride, settings.padding))
    if kernel is None or stride is None or padding is None:
        return None
    channels, height, width = shape
    filters = channels if settings.filters is None else settings.filters
    window = Window(channels, (height, width), filters, kernel, stride, padding)
    if min(window.output_size) < 1:
        return None
    return Layer(
        module=module,
        name=name,
        kind=settings.kind,
        inputs=math.prod(shape),
        outputs=filters * math.prod(window.output_size),
        groups=settings.groups,
        setting=settings.setting,
        window=window,
    )


def _inverse_epsilon(epsilon: float) -> tuple[int, bool]:
    """Return 1 / ``epsilon`` as an integer, and True if rounding changes it by at most 0.1 %."""
    setting = round(1 / epsilon) if epsilon > 0 else 0
    return setting, math.isclose(setting * epsilon, 1, rel_tol=1e-3)


def _pair(value: object) -> tuple[int, int] | None:
    """Return an int or a pair of ints as a pair; None for any other value, such as ``"same"``."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    return None
