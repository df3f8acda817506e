"""K models of one architecture by `torch.vmap`, which knows nearly every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flower_ext.training.batched.form import Loss, Target, stacked
from flower_ext.training.batched.unfused import unfuse
from flower_ext.training.dropout import Draws


class MappedModel:
    """K models of any architecture that `torch.vmap` knows, at its overhead."""

    fewest = 5
    steady = False
    """Nobody knows how what vmap makes of a model rounds."""
    draws = False

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, p in model.named_parameters() if p.requires_grad]
        self._model = unfuse(model)

    @staticmethod
    def stack(many: Sequence[Tensor]) -> Tensor:
        """One parameter of many models."""
        return stacked(many)

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: Loss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """As `ManyModels.gradient`."""
        leaves = {n: p.detach().requires_grad_() for n, p in params.items() if n in targets}
        outputs = vmap(lambda own, rows: functional_call(self._model, own, (rows,)))(
            {**params, **leaves}, x
        )
        slopes = torch.autograd.grad(
            loss(outputs), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        for name, slope in zip(leaves, slopes, strict=True):
            targets[name].add(slope)
