"""Recognition of models that are a chain of known layers, by their modules or by a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from flower_ext.training.models.dropout import LEVELS, levels_dropped
from flower_ext_kernels.layer_table import (
    CHANNELS,
    CONVOLUTION,
    DENSE,
    DOWN,
    DROP,
    FILTERS,
    HEIGHT,
    IMAGE_NORM,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    MEAN,
    NORM,
    OUT_HEIGHT,
    OUT_WIDTH,
    PAD_DOWN,
    PAD_RIGHT,
    PLAIN,
    POOL,
    RELU,
    RIGHT,
    SIGMOID,
    TANH,
    TURN,
    WIDTH,
)

_ACTIVATIONS: Mapping[Any, int] = {
    nn.Identity: PLAIN,
    **dict.fromkeys((nn.ReLU, torch.relu, functional.relu, "relu"), RELU),
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh"), TANH),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid"), SIGMOID),
}
_IMAGE = 3
"""Dimensions of an image: channels, height and width."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The place of one parameter in the array that holds all numbers of a network.

    In this array the weight of a convolution has the shape (kernel height, kernel width, channels,
    filters). In PyTorch it has the shape (filters, channels, kernel height, kernel width).
    """

    start: int
    shape: torch.Size

    @property
    def slice(self) -> slice:
        """Slice of this parameter's numbers in the network."""
        return slice(self.start, self.start + self.shape.numel())

    @property
    def is_transposed(self) -> bool:
        """True if the order of the parameter's numbers differs from PyTorch's."""
        return len(self.shape) == 4

    def laid_out(self, parameter: Tensor) -> Tensor:
        """Return the numbers of a parameter in the order of the network."""
        moved = parameter.permute(2, 3, 1, 0) if self.is_transposed else parameter
        return moved.flatten()

    def parameter_of(self, rows: Tensor) -> Tensor:
        """Return this parameter for all networks, stacked; ``rows`` has one network per row."""
        numbers = rows[:, self.slice]
        if not self.is_transposed:
            return numbers.view(-1, *self.shape)
        filters, channels, height, width = self.shape
        return numbers.view(-1, height, width, channels, filters).permute(0, 4, 3, 1, 2)


@dataclass(frozen=True)
class Window:
    """The window of a convolution or a pooling, which moves over an image.

    Pairs are (height, width). ``border`` says how many zeros surround the image on each side.
    """

    channels: int
    size: tuple[int, int]
    filters: int
    kernel: tuple[int, int]
    step: tuple[int, int]
    border: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the images after the layer."""
        height, width = (
            (size + 2 * border - kernel) // step + 1
            for size, border, kernel, step in zip(
                self.size, self.border, self.kernel, self.step, strict=True
            )
        )
        return height, width

    @property
    def padded(self) -> int:
        """Number of values in an image with its border."""
        height, width = (
            size + 2 * border for size, border in zip(self.size, self.border, strict=True)
        )
        return self.channels * height * width

    def describe(self, row: np.ndarray) -> None:
        """Write this window to its columns in a row of `layer_table`'s table."""
        row[CHANNELS], row[FILTERS] = self.channels, self.filters
        row[HEIGHT], row[WIDTH] = self.size
        row[OUT_HEIGHT], row[OUT_WIDTH] = self.out
        row[KERNEL_HEIGHT], row[KERNEL_WIDTH] = self.kernel
        row[DOWN], row[RIGHT] = self.step
        row[PAD_DOWN], row[PAD_RIGHT] = self.border


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
    activation: int = PLAIN
    window: Window | None = None

    @property
    def scratch(self) -> int:
        """Number of values that a pass stores for one example, besides outputs and their slopes."""
        if self.window is None:
            return 0
        window = self.window
        weights = math.prod(window.kernel) * window.channels * window.filters
        return weights + window.padded + 3 * window.channels


def recognise_chain(model: nn.Module, shape: torch.Size) -> list[Layer]:
    """Return the layers of a model in order.

    The list is empty if the model is not a chain, if it does not end in one row of numbers, or if
    machine code cannot run one of its layers.

    Parameters
    ----------
    shape : torch.Size
        Shape of one example: a row of features, or an image (channels, height, width) if the first
        layer works on images. `nn.Flatten` may come first.
    """
    layers: list[Layer] = []
    now = shape
    for name, operation in _in_a_row(model) or _traced(model):
        follows = _ACTIVATIONS.get(type(operation) if name else operation)
        if (numbers := _flattens(operation, now)) is not None:
            layers += _turned(now, back=True) if layers else []
            now = torch.Size([numbers])
        elif follows is not None and layers and layers[-1].activation == PLAIN:
            layers[-1] = replace(layers[-1], activation=follows)
        elif len(now) == 1 and (layer := _layer(operation, name, now.numel())) is not None:
            layers.append(layer)
            now = torch.Size([layer.outputs])
        elif len(now) == _IMAGE and (layer := _on_images(operation, name, now)) is not None:
            layers += [*([] if layers else _turned(now)), layer]
            assert layer.window is not None
            now = torch.Size([layer.window.filters, *layer.window.out])
        else:
            return []
    return _pooled_first(layers) if len(now) == 1 else []


def _flattens(operation: object, shape: torch.Size) -> int | None:
    """Return the size of an example if ``operation`` flattens it to one row, else None."""
    if isinstance(operation, nn.Flatten):
        whole = (operation.start_dim, operation.end_dim) == (1, -1)
    else:
        whole = operation == torch.Size([shape.numel()])
    return shape.numel() if whole else None


def _turned(shape: torch.Size, *, back: bool = False) -> list[Layer]:
    """Return a list with the layer that moves an image's channels to the last dimension.

    If ``back`` is True, the layer moves them from the last dimension to the first. The list is
    empty if ``shape`` is not an image, or if the image has one channel or one pixel, because all
    numbers would keep their places.
    """
    size, channels = shape.numel(), shape[0]
    if len(shape) != _IMAGE or channels in (1, size):
        return []
    turn = Layer(
        module=nn.Identity(),
        name="",
        kind=TURN,
        inputs=size,
        outputs=size,
        setting=size // channels if back else channels,
    )
    return [turn]


def _pooled_first(layers: list[Layer]) -> list[Layer]:
    """Return the layers, with every ReLU that precedes a max pooling moved behind the pooling.

    Values and gradients stay the same, and the ReLU handles a fraction of the numbers.
    """
    layers = [*layers]
    for number, (before, after) in enumerate(pairwise(layers)):
        if after.kind == POOL and before.activation == RELU and after.activation in (PLAIN, RELU):
            layers[number] = replace(before, activation=PLAIN)
            layers[number + 1] = replace(after, activation=RELU)
    return layers


def _in_a_row(module: nn.Module, name: str = "") -> list[tuple[str, Any]]:
    """Return the names and modules of an `nn.Sequential`, in order; for other models, nothing.

    A sequence needs no trace. Each message may bring a new model, and a trace would take longer
    than the training of the model.
    """
    if type(module) is not nn.Sequential:
        return [(name, module)] if name else []
    return [
        named
        for leaf, child in module._modules.items()  # may contain the same module twice
        for named in _in_a_row(child, f"{name}.{leaf}".removeprefix("."))
    ]


def _traced(model: nn.Module) -> list[tuple[str, Any]]:
    """Trace a model, and return the names and operations of its chain, in order.

    None stands for an operation that no chain may have. The result is empty if PyTorch cannot
    trace the model.
    """
    try:
        nodes = list(fx.Tracer().trace(model).nodes)
    except Exception:  # a forward method may raise anything for a symbol
        return []
    operations: list[tuple[str, Any]] = []
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before]:
            return [("", None)]
        if node.op == "output":
            return operations
        operations.append(_operation(node, model))
    return [("", None)]


def _operation(node: fx.Node, model: nn.Module) -> tuple[str, Any]:
    """Return the name and the operation of one step of a trace.

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


def _layer(module: Any, name: str, width: int) -> Layer | None:
    """Return the layer for a module on rows of ``width`` numbers; None if machine code has none."""
    if type(module) is nn.Linear:
        inputs, outputs = module.in_features, module.out_features
        return Layer(module=module, name=name, kind=DENSE, inputs=inputs, outputs=outputs)
    kind, groups, setting = DROP, 1, 0
    if type(module) is nn.Dropout and module.training:
        setting = levels_dropped(module.p)
        known = 0 < setting < LEVELS
    elif type(module) in (nn.GroupNorm, nn.LayerNorm):
        grouped = isinstance(module, nn.GroupNorm)
        kind, groups = NORM, module.num_groups if grouped else 1
        over = (module.num_channels,) if grouped else module.normalized_shape
        setting, known = _parts_of(module.eps)
        known = known and over == (width,)
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
class _Form:
    """The form that a module takes as a layer on images.

    ``kernel``, ``step`` and ``border`` are as PyTorch's modules have them. ``filters`` is None if
    the images keep their number of channels.
    """

    kind: int
    kernel: object = 1
    step: object = 1
    border: object = 0
    filters: int | None = None
    groups: int = 1
    setting: int = 0


def _convolution(module: nn.Conv2d, shape: Sequence[int]) -> _Form | None:
    if module.groups != 1 or module.padding_mode != "zeros" or module.in_channels != shape[0]:
        return None
    if _pair(module.dilation) != (1, 1):
        return None
    return _Form(
        kind=CONVOLUTION,
        kernel=module.kernel_size,
        step=module.stride,
        border=module.padding,
        filters=module.out_channels,
    )


def _max_pooling(module: nn.MaxPool2d, shape: Sequence[int]) -> _Form | None:
    if module.ceil_mode or module.return_indices or _pair(module.padding) != (0, 0):
        return None
    if _pair(module.dilation) != (1, 1):
        return None
    return _Form(kind=POOL, kernel=module.kernel_size, step=module.stride)


def _mean_pooling(module: nn.AvgPool2d, shape: Sequence[int]) -> _Form | None:
    if module.ceil_mode or module.divisor_override is not None or _pair(module.padding) != (0, 0):
        return None
    return _Form(kind=MEAN, kernel=module.kernel_size, step=module.stride)


def _mean_of_all(module: nn.AdaptiveAvgPool2d, shape: Sequence[int]) -> _Form | None:
    return _Form(kind=MEAN, kernel=tuple(shape[1:])) if module.output_size in (1, (1, 1)) else None


def _image_norm(module: nn.GroupNorm, shape: Sequence[int]) -> _Form | None:
    setting, exact = _parts_of(module.eps)
    if not exact or module.num_channels != shape[0]:
        return None
    return _Form(kind=IMAGE_NORM, groups=module.num_groups, setting=setting)


_IMAGE_FORMS: Mapping[type, Callable[..., _Form | None]] = {
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _max_pooling,
    nn.AvgPool2d: _mean_pooling,
    nn.AdaptiveAvgPool2d: _mean_of_all,
    nn.GroupNorm: _image_norm,
}
"""Modules on images. Their functions return None for settings that machine code does not have."""


def _on_images(module: Any, name: str, shape: Sequence[int]) -> Layer | None:
    """Return the layer for a module on images of ``shape``; None if machine code has none."""
    form_of = _IMAGE_FORMS.get(type(module))
    if form_of is None or (form := form_of(module, shape)) is None:
        return None
    kernel, step, border = (_pair(value) for value in (form.kernel, form.step, form.border))
    if kernel is None or step is None or border is None:
        return None
    channels, height, width = shape
    filters = channels if form.filters is None else form.filters
    window = Window(channels, (height, width), filters, kernel, step, border)
    if min(window.out) < 1:
        return None
    return Layer(
        module=module,
        name=name,
        kind=form.kind,
        inputs=math.prod(shape),
        outputs=filters * math.prod(window.out),
        groups=form.groups,
        setting=form.setting,
        window=window,
    )


def _parts_of(epsilon: float) -> tuple[int, bool]:
    """Return 1 / ``epsilon`` as an integer, and True if rounding changes it by at most 0.1 %."""
    setting = round(1 / epsilon) if epsilon > 0 else 0
    return setting, math.isclose(setting * epsilon, 1, rel_tol=1e-3)


def _pair(value: object) -> tuple[int, int] | None:
    """Return an int, or a pair of them, as a pair; None for others, such as ``"same"``."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    return None
