"""What one client minimises: the loss of a model on its examples, and terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.blueprint import in_training
from flower_ext.training.calls import Replaced, spared
from flower_ext.training.dropout import own_dropout
from flower_ext.training.hulls import hull_of
from flower_ext.training.objective import Term
from flower_ext.training.params import Params, to_device
from flower_ext.training.task import Task


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """What one client minimises: loss plus terms, over the trained part of a model.

    Parameters that ``loss_at`` is given again, as the same object, have to be the same tensors.
    """

    start: Params
    loss_at: Callable[[Params, Tree, Tree], Tensor]
    rest: Params
    device: torch.device
    replaceable: bool
    """Whether the model might replace numbers that it is given (see `minimise`)."""

    def whole(self, trained: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Params:
        """The whole model with its trained part replaced, devices and types those of ``like``."""
        everything = {**self.rest, **trained}
        return {name: _like(everything[name], p) for name, p in like.items()}


def local_problem(
    task: Task,
    params: Mapping[str, Tensor],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    terms: Sequence[Term] = (),
    dtype: torch.dtype | None = None,
    any_layout: bool = False,
) -> LocalProblem:
    """The local objective on the task's device; parameters not ``trained`` are frozen.

    With a ``dtype`` all floating-point parameters are converted to it. With ``any_layout`` they may
    lie in memory as the model is faster with them, until `LocalProblem.whole`.

    Raises
    ------
    ValueError
        ``trained`` selects nothing.
    """
    device = task.torch_device()
    everything = to_device(params, device)
    if dtype is not None:
        everything = {n: p.to(dtype) if p.is_floating_point() else p for n, p in everything.items()}
    layout = torch.contiguous_format
    hull = hull_of(task.blueprint, device) if dtype is None else None
    known = hull is not None and hull.takes(params)
    if hull is not None and known:
        replaced, learnable = hull.copied(), hull.learnable
        if any_layout and hull.convolves and device.type == "cpu":
            layout = torch.channels_last
    else:
        model = own_dropout(in_training(task.model().to(device)))
        if dtype is not None and task.blueprint.frozen:
            model = deepcopy(model).to(dtype)
        replaced = Replaced(model)
        learnable = frozenset(name for name, _ in model.named_parameters())
    start = {
        name: _laid(p, layout)
        for name, p in everything.items()
        if name in learnable and trained(name)
    }
    if not start:
        raise InvalidValue("trained selects no parameter of the model")
    # Buffers (if any) are updated in place by the model; copies keep the caller's untouched.
    rest = {name: p.clone() for name, p in everything.items() if name not in start}

    placed: Params | None = None

    def loss_at(chosen: Params, x: Tree, y: Tree) -> Tensor:
        nonlocal placed
        if chosen is not placed:
            replaced.by({**rest, **chosen})
            placed = chosen
        value = task.loss(replaced(_laid(spared(task, x), layout)), y)
        for term in terms:
            value = value + term(chosen)
        return value

    return LocalProblem(
        start=start, loss_at=loss_at, rest=rest, device=device, replaceable=not known
    )


def _laid(tree: Tree, layout: torch.memory_format) -> Tree:
    """Return images, or weights of convolutions of them, in another order in memory."""
    images = isinstance(tree, Tensor) and tree.dim() == 4 and layout == torch.channels_last
    return tree.to(memory_format=layout) if images else tree


def _like(one: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the other's device, of its type, and in the usual order in memory."""
    moved = one.to(other.device, other.dtype)
    usual = moved.stride() == other.stride()
    return moved if usual else moved.clone(memory_format=torch.contiguous_format)
