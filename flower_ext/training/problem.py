"""The problem of one client: the loss of a model on the client's examples, plus terms.

A term is any function of the parameters being trained. A method states its objective by adding
terms, so it needs no training loop of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from flower_ext.checks import Checked, NotNegative
from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.models.calls import settable_model
from flower_ext.training.models.factory import suits_channels_last
from flower_ext.training.params import Params, to_device
from flower_ext.training.task import Task


class Term(Protocol):
    """A differentiable addition to the loss."""

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term (a scalar) at ``params``, the parameters being trained."""
        ...


@dataclass(frozen=True, kw_only=True)
class Proximal(Checked):
    """The term (weight / 2) ‖w − anchor‖², where w are the trained parameters (FedProx, Ditto)."""

    weight: NotNegative
    anchor: Mapping[str, Tensor]

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term at ``params``."""
        pulls = ((p - self.anchor[name].to(p.device)).square().sum() for name, p in params.items())
        return 0.5 * self.weight * torch.stack([*pulls]).sum()


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear term of the loss, ⟨direction, w⟩, where w are the trained parameters.

    Objective perturbation and control variates use it.
    """

    direction: Mapping[str, Tensor]

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term at ``params``."""
        products = [(p * self.direction[name].to(p.device)).sum() for name, p in params.items()]
        return torch.stack(products).sum()


def affine(terms: Sequence[Term]) -> Iterator[tuple[float, float, Mapping[str, Tensor]]]:
    """Yield (slope, scale, vector) per term, whose gradient at w is slope · w + scale · vector."""
    for term in terms:
        if type(term) is Proximal:  # a subclass may be another function
            yield term.weight, -term.weight, term.anchor
        elif type(term) is Linear:
            yield 0.0, 1.0, term.direction
        else:
            raise InvalidValue(f"term of type {type(term).__name__}: expected Proximal or Linear")


def gradient(loss_at: Callable[..., Tensor], params: Mapping[str, Tensor], *data: Tree) -> Params:
    """Return the gradient of the scalar ``loss_at(params, *data)`` with respect to ``params``."""
    # Make new leaves each time, because a model that bounds its weights replaces the leaves.
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    slopes = torch.autograd.grad(
        loss_at(leaves, *data), [*leaves.values()], allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, slopes, strict=True))


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """One client's objective: loss plus terms, as a function of the trained part of a model.

    ``start`` is the trained part before training, and ``rest`` all other parameters and buffers.
    ``loss_at`` returns the objective, a scalar, from the trained part, features and targets.
    """

    start: Params
    loss_at: Callable[[Params, Tree, Tree], Tensor]
    rest: Params
    device: torch.device
    preserved_buffers: Callable[[], AbstractContextManager[None]]
    """Returns a context manager that restores buffers of the model, such as running means."""

    def whole(self, trained: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Params:
        """Return all parameters and buffers of the model, with ``trained`` as the trained part.

        Each tensor gets the device, type and memory order of its namesake in ``like``.
        """
        everything = {**self.rest, **trained}
        moved = {name: everything[name].to(p.device, p.dtype) for name, p in like.items()}
        usual = torch.contiguous_format
        return {
            name: p if p.stride() == like[name].stride() else p.clone(memory_format=usual)
            for name, p in moved.items()
        }


def local_problem(
    task: Task,
    params: Mapping[str, Tensor],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    terms: Sequence[Term] = (),
    dtype: torch.dtype | None = None,
) -> LocalProblem:
    """Return the local objective on the task's device.

    ``trained`` selects the parameters that train; all others are frozen.

    With a ``dtype``, all floating-point parameters are converted to this type. Parameters may have
    the memory order that is fastest for the model. `LocalProblem.whole` restores the usual order.

    Raises
    ------
    ValueError
        ``trained`` selects nothing.
    """
    device = task.torch_device()
    everything = to_device(params, device)
    if dtype is not None:
        everything = {n: p.to(dtype) if p.is_floating_point() else p for n, p in everything.items()}
    settable = settable_model(task.factory, everything, device, trains=True, dtype=dtype)
    model = settable.model
    chosen = {name for name, _ in model.named_parameters() if trained(name)}
    # A module that is not of PyTorch or this package might rely on the usual memory order.
    any_order = task.factory.facts.known and device.type == "cpu"
    channels_last = any_order and suits_channels_last(model, chosen)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    start = {name: _laid(p, layout) for name, p in everything.items() if name in chosen}
    if not start:
        raise InvalidValue("trained selects no parameter of the model: expected at least one")
    # The model updates its buffers in place; these copies leave the caller's untouched.
    rest = {name: p.clone() for name, p in everything.items() if name not in start}

    def loss_at(weights: Params, x: Tree, y: Tree) -> Tensor:
        settable.set_params({**rest, **weights})
        # Copy the features, because the model may write into them.
        value = task.loss(settable(_laid(trees.mapped(Tensor.clone, x), layout)), y)
        for term in terms:
            value = value + term(weights)
        return value

    return LocalProblem(
        start=start,
        loss_at=loss_at,
        rest=rest,
        device=device,
        preserved_buffers=partial(_unmoved_buffers, model),
    )


@contextmanager
def _unmoved_buffers(model: nn.Module) -> Iterator[None]:
    held = [
        (module._buffers, leaf, buffer, buffer.clone())
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for buffers, leaf, buffer, before in held:
        buffers[leaf] = buffer.copy_(before)


def _laid(tree: Tree, layout: torch.memory_format) -> Tree:
    """Convert a 4-dimensional tensor if ``layout`` is channels last; return others unchanged."""
    images = isinstance(tree, Tensor) and tree.dim() == 4 and layout == torch.channels_last
    return tree.to(memory_format=layout) if images else tree
