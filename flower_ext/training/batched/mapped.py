"""K models of one architecture by `torch.vmap`, which supports nearly every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flower_ext.training.batched.form import Loss, Target, stacked
from flower_ext.training.batched.unfused import unfuse
from flower_ext.training.dropout import Draws


class MappedModel:
    """K models of any architecture that `torch.vmap` supports, at its overhead."""

    fewest = 5
    batch_invariant = False
    """False because the rounding of vmap's operations is unknown."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, p in model.named_parameters() if p.requires_grad]
        self._model = unfuse(model)
        dropouts = [m for m in model.modules() if type(m) is nn.Dropout and m.p > 0]
        for layer in dropouts:
            layer.forward = partial(self._dropped, layer)  # type: ignore[method-assign]
        self.draws = bool(dropouts)
        self._now: Draws | None = None

    @staticmethod
    def stack(many: Sequence[Tensor]) -> Tensor:
        """Stack one parameter of many models."""
        return stacked(many)

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: Loss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """Send the gradient to ``targets``, as `ManyModels.gradient` does."""
        leaves = {n: p.detach().requires_grad_() for n, p in params.items() if n in targets}
        self._now = draws
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run other kernels model by model
            outputs = vmap(lambda model, rows: functional_call(self._model, model, (rows,)))(
                {**params, **leaves}, x
            )
            slopes = torch.autograd.grad(
                loss(outputs), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        for name, slope in zip(leaves, slopes, strict=True):
            targets[name].add(slope)

    def _dropped(self, layer: nn.Dropout, x: Tensor) -> Tensor:
        if not layer.training:
            return x
        noise: Tensor = _Noise.apply(x, layer.p, self._now)  # type: ignore[no-untyped-call]
        return x.mul_(noise) if layer.inplace else x * noise


class _Noise(torch.autograd.Function):
    """Dropout factors of all models; defined under vmap only."""

    @staticmethod
    def forward(x: Tensor, p: float, draws: Draws) -> Tensor:
        raise NotImplementedError("dropout of values that are the same for every model")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing, because random numbers have no gradient."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: float, draws: Draws
    ) -> tuple[Tensor, int]:
        """Return the factors of all models."""
        assert in_dims[0] is not None
        return draws.noise(x.movedim(in_dims[0], 0).shape, p, x.dtype), 0
