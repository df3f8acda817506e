"""One architecture with many sets of parameters: K models on K mini-batches in one pass.

`torch.vmap` computes the models. This module replaces dense and image layers, which vmap computes
slowly. The weights of dense layers never get a gradient tensor of their own. Instead the backward
pass adds the gradient directly to its target: a velocity, a gradient, or the weights themselves.
That saves writing and reading the largest tensors of the computation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flower_ext.errors import InvalidValue
from flower_ext.training.models.dropout import Draws
from flower_ext.training.models.factory import tied_names

BatchLoss = Callable[[Tensor], Tensor]
"""A function from the outputs of K models, of shape (K, batch, …), to a number."""


@dataclass(frozen=True)
class Target:
    """A tensor, to which a backward pass adds ``factor`` times a parameter's gradient."""

    tensor: Tensor
    factor: float = 1.0

    def add(self, gradient: Tensor) -> None:
        """Add ``factor`` times ``gradient`` to the tensor."""
        self.tensor.add_(gradient, alpha=self.factor)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add ``factor`` times the gradient a @ b to the tensor, without storing a @ b."""
        self.tensor.baddbmm_(a, b, alpha=self.factor)


@dataclass
class _Pass:
    """State of one forward and backward pass."""

    targets: Mapping[str, Target]
    """Targets of gradients, by the names of parameters."""
    draws: Draws | None
    """Random numbers for dropout."""
    root: Tensor
    """A tensor that requires a gradient, so that autograd calls the backward of `_Product`."""
    sent: set[str] = field(default_factory=set)
    """Names of the parameters whose gradients the layers themselves add to the targets."""

    def targets_of(self, layer: str) -> list[Target | None]:
        """Return the targets, or None, to which a layer adds the gradients of weight and bias."""
        names = [f"{layer}.{leaf}".lstrip(".") for leaf in ("weight", "bias")]
        if used := self.sent.intersection(names):
            raise RuntimeError(f"parameter {min(used)!r} is used twice")
        self.sent.update(self.targets.keys() & names)
        return [self.targets.get(name) for name in names]


class MappedModel:
    """K models of any architecture that `torch.vmap` supports.

    The constructor replaces the ``forward`` methods of layers of ``model``. The parameters of
    ``model`` have no effect. With ``by_products``, convolutions are computed as products of
    matrices. That is the default on accelerators, where convolutions of many groups are slow. The
    constructor refuses a model with a layer that would compute other numbers for K models together
    than for each model alone.
    """

    fewest = 5
    """Smallest number of models that train faster in a batch than one by one."""

    def __init__(self, model: nn.Module, *, by_products: bool | None = None) -> None:
        self.parameters = [name for name, p in model.named_parameters() if p.requires_grad]
        """Names of the trained parameters."""
        self._model = model
        self._pass: _Pass
        self._is_tied = bool(tied_names(model))
        on_cpu = all(parameter.is_cpu for parameter in model.parameters())
        self._by_products = not on_cpu if by_products is None else by_products
        self.draws = False
        """True if a model draws random numbers."""
        for name, layer in model.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
                raise InvalidValue("batch normalisation changes the model in each forward pass")
            if _drops(layer) and not (type(layer) is nn.Dropout and on_cpu):
                raise InvalidValue(
                    f"{layer} would draw different random numbers in a batch of models than alone"
                )
            if "forward" in vars(layer):
                continue
            self.draws = self.draws or _drops(layer)
            if (forward := self._forward_of(name, layer)) is not None:
                layer.forward = partial(forward, layer)

    def _forward_of(self, name: str, layer: nn.Module) -> Callable[..., Tensor] | None:
        """Return a function that computes a layer for all models; None if vmap computes it."""
        if _drops(layer):
            return self._drop
        if type(layer) is nn.Linear and not self._is_tied:
            return partial(self._multiply, name)
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
            has_product = layer.groups == 1 and layer.padding != "same" and not self._is_tied
            by_product = has_product and self._by_products
            return partial(self._multiply_patches, name) if by_product else _convolve
        if type(layer) is nn.GroupNorm:
            return _normalise
        if type(layer) in _POOLING:
            return partial(_pool, layer.forward, by_channel=not self._by_products)
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            if layer.max_norm is not None or layer.scale_grad_by_freq:
                raise InvalidValue(
                    f"{layer} cannot be stacked: padding_idx does not go with max_norm or "
                    "scale_grad_by_freq"
                )
            return _look_up
        return None

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: BatchLoss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """Compute the gradient of ``loss`` and add it to ``targets``.

        ``params`` and the mini-batches ``x`` have a first dimension of K. A parameter without a
        target is frozen: no gradient is computed for it. Models whose `draws` is true need
        ``draws``.
        """
        leaves = {n: p.detach().requires_grad_() for n, p in params.items() if n in targets}
        self._pass = _Pass(targets, draws, torch.zeros((), device=x.device).requires_grad_())
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run other kernels model by model
            outputs = vmap(lambda model, rows: functional_call(self._model, model, (rows,)))(
                {**params, **leaves}, x
            )
            inputs = [self._pass.root, *leaves.values()]
            _, *slopes = torch.autograd.grad(loss(outputs), inputs, allow_unused=True)
        # The gradients of dense layers are None here: the layers sent them to their targets.
        for name, slope in zip(leaves, slopes, strict=True):
            if slope is not None and name in self._pass.sent:
                # The caller falls back to another form of training, and shows no error.
                raise RuntimeError(f"parameter {name!r} is used outside its layer")
            if slope is not None:
                targets[name].add(slope)

    def _multiply(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        root, targets = self._pass.root, self._pass.targets_of(name)

        def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
            # Make rows contiguous: products are slow if the matrices do not adjoin in memory.
            y: Tensor = _Product.apply(root, rows.contiguous(), weight, bias, *targets)  # type: ignore[no-untyped-call]
            return y.view(*x.shape[:-1], y.shape[-1])

        return _for_all_models(compute, x, layer.weight, layer.bias)

    def _multiply_patches(self, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
        """Compute a convolution as the product of the images' patches and the kernels."""
        if x.dim() != 4:
            return nn.Conv2d.forward(layer, x)
        root, (weight_target, bias_target) = self._pass.root, self._pass.targets_of(name)
        if weight_target is not None:
            weight_target = replace(weight_target, tensor=weight_target.tensor.flatten(2))

        def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            patches = functional.unfold(
                x.flatten(0, 1), layer.kernel_size, layer.dilation, _padding(layer), layer.stride
            )
            rows = patches.mT.reshape(len(x), -1, patches.shape[1])
            kernels = weight.flatten(2)
            y: Tensor = _Product.apply(root, rows, kernels, bias, weight_target, bias_target)  # type: ignore[no-untyped-call]
            size = layer.dilation[0] * (layer.kernel_size[0] - 1) + 1
            height = (x.shape[3] + 2 * _padding(layer)[0] - size) // layer.stride[0] + 1
            return y.view(*x.shape[:2], height, -1, weight.shape[1]).movedim(-1, 2)

        return _for_all_models(compute, x, layer.weight, layer.bias)

    def _drop(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            assert self._pass.draws is not None
            return x * self._pass.draws.noise(x.shape, layer.p, x.dtype)

        return _for_all_models(compute, x) if layer.training else x


def stacked(many: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors on a device as `torch.stack` does, faster if all are the same object."""
    one = many[0]
    if any(other is not one for other in many):
        return torch.stack(list(many)).detach().to(device)
    return one.detach().to(device).unsqueeze(0).repeat(len(many), *(1 for _ in one.shape))


def _drops(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0


def _for_all_models(compute: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return ``compute(*tensors)``, where the first dimension of each tensor numbers the models."""
    y: Tensor = _ForAllModels.apply(compute, *tensors)  # type: ignore[no-untyped-call]
    return y


class _ForAllModels(torch.autograd.Function):
    """Calls ``compute`` once, on the tensors of all models; it works only inside `torch.vmap`."""

    @staticmethod
    def forward(compute: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        raise NotImplementedError(
            "models cannot train together: a layer has the same inputs and weights in every model, "
            "and a batch takes only layers whose inputs or weights differ by model"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: autograd follows the operations of the function."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        compute: Callable[..., Tensor],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, int]:
        """Compute the values of all models."""
        of_models = [
            tensor
            if tensor is None
            else tensor.expand(info.batch_size, *tensor.shape)
            if dim is None
            else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        return compute(*of_models), 0


class _Product(torch.autograd.Function):
    """Compute x Wᵀ + b; the backward pass adds the gradients of W and b to their targets."""

    @staticmethod
    def forward(
        ctx: Any,
        root: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_target: Target | None,
        bias_target: Target | None,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.targets = x, weight, (weight_target, bias_target)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        # The product with W comes first, because a target may be W itself.
        input_slope = torch.bmm(slope, ctx.weight) if ctx.needs_input_grad[1] else None
        weight_target, bias_target = ctx.targets
        if weight_target is not None:
            weight_target.add_product(slope.mT, ctx.x)
        if bias_target is not None:
            bias_target.add(slope.sum(dim=1))
        return None, input_slope, None, None, None, None


def _convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    if x.dim() != 4:
        return nn.Conv2d.forward(layer, x)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # One convolution computes all models: each has its channels, and its group of kernels.
        groups, kernel = len(weight) * layer.groups, weight.flatten(0, 1)
        added = None if bias is None else bias.flatten()
        stride, padding, dilation = layer.stride, layer.padding, layer.dilation
        y = functional.conv2d(_by_channel(x), kernel, added, stride, padding, dilation, groups)
        return _by_model(y, len(weight))

    return _for_all_models(compute, x, layer.weight, layer.bias)


def _normalise(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    # Under vmap, group normalisation supports no other memory order.
    return nn.GroupNorm.forward(layer, x.contiguous())


def _look_up(layer: nn.Embedding, x: Tensor) -> Tensor:
    # vmap joins all tables into one, and would then find the padding row of the first table only.
    rows = functional.embedding(x, layer.weight)
    padding = torch.eq(x, layer.padding_idx)  # type: ignore[arg-type]
    return torch.where(padding.unsqueeze(-1), rows.detach(), rows)


_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
BY_CHANNEL = (nn.modules.conv._ConvNd, *_POOLING)
"""Layers that treat a stack of models as one model with the channels of all of them."""


def _pool(
    pool: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, *, by_channel: bool
) -> Tensor:
    if x.dim() != 4:
        return pool(x)
    if by_channel:
        return _for_all_models(lambda x: _by_model(pool(_by_channel(x)), len(x)), x)

    def compute(x: Tensor) -> Tensor:
        pooled = pool(x.flatten(0, 1))
        return pooled.view(*x.shape[:2], *pooled.shape[1:])

    return _for_all_models(compute, x)


def _padding(layer: nn.Conv2d) -> tuple[int, ...]:
    """Return the numbers of rows and columns of zeros that pad each side of an image.

    If the layer's padding is a string, it is "valid", which means no padding.
    """
    return (0, 0) if isinstance(layer.padding, str) else layer.padding


def _by_channel(x: Tensor) -> Tensor:
    """Convert (K, batch, C, h, w) to (batch, K·C, h, w), channels last in memory."""
    return x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _by_model(x: Tensor, count: int) -> Tensor:
    """Convert (batch, K·C, h, w) back to (K, batch, C, h, w), for K = ``count`` models."""
    return x.view(len(x), count, -1, *x.shape[2:]).transpose(0, 1)
