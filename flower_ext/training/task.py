"""What a user writes once and every method uses: model, loss and the data of each partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue
from flower_ext.training.blueprint import Blueprint, blueprint
from flower_ext.training.params import Params


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Fraction of rows of ``outputs`` (n, classes) whose largest entry is the target.

    Raises
    ------
    ValueError
        Outputs or targets are no single tensor, or targets are no numbers of classes.
    """
    for name, tree in (("outputs", outputs), ("targets", targets)):
        if not isinstance(tree, Tensor):
            raise InvalidValue(
                f"accuracy with {name} of type {type(tree).__name__}: expected one tensor; name "
                "what reads yours in Task(metrics={...}), as lambda outputs, targets: "
                "accuracy(outputs.logits, targets)"
            )
    if targets.is_floating_point():
        raise InvalidValue(
            f"accuracy with targets of type {targets.dtype}: expected numbers of classes; name "
            "what fits yours in Task(metrics={...})"
        )
    return float((outputs.argmax(dim=1) == targets).float().mean())


@dataclass(frozen=True, kw_only=True)
class Task:
    """A federated learning problem.

    Parameters
    ----------
    model : Callable[[], nn.Module]
        Builds a fresh model, always of one kind: what is found out about the first is not asked of
        others, so that other settings want another function. It is given features as `Examples`
        says. Parameter names matter: ``personal`` prefixes refer to them. Parameters without
        ``requires_grad`` are frozen: they neither train nor travel nor count in a norm, every node
        has them from its own ``model()``, and the buffers beside them stay as they are.
    data : Callable[[int], ClientData]
        Training and test examples of partition ``i``.
    loss : Callable[..., Tensor]
        Mean loss of a batch, from what the model puts out, whatever that is, and targets. One that
        is no mean over examples has a third parameter ``present``: booleans that tell examples from
        padding (see `cox_loss`).
    metrics : Mapping[str, Callable[[Any, Any], float]]
        Named quality measures over all test outputs of one client, and targets. Of more examples
        than one mini-batch, outputs must be tensors with a row an example, or tuples, mappings or
        dataclasses of them (see `predict`).
    device : str
        ``"auto"`` takes a CUDA device where there is one.
    trainable : Sequence[str], optional
        Names of modules or parameters, where ``*`` stands for any part: these train and all others
        are frozen, whatever their ``requires_grad``. FFA-LoRA (Sun et al. 2024), say, which trains
        the second matrices of adapters alone, is ``("*.lora_B", "*.modules_to_save")``.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], ClientData]
    loss: Callable[..., Tensor] = functional.cross_entropy
    metrics: Mapping[str, Callable[[Any, Any], float]] = field(
        default_factory=lambda: {"accuracy": accuracy}
    )
    device: str = "auto"
    trainable: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise TypeError(
                f"model is a {type(self.model).__name__}: expected a function that builds one"
            )
        if not callable(self.data):
            raise TypeError(
                f"data is a {type(self.data).__name__}: expected a function of the partition"
            )
        if isinstance(self.trainable, str):
            raise InvalidValue(
                f"trainable={self.trainable!r}: expected several names, as ({self.trainable!r},)"
            )
        object.__setattr__(self, "loss", _hashable(self.loss))  # a key of caches
        trainable = None if self.trainable is None else tuple(self.trainable)
        object.__setattr__(self, "trainable", trainable)
        object.__setattr__(self, "model", blueprint(self.model, trainable))

    @property
    def compares_examples(self) -> bool:
        """Whether the loss of a batch is no mean over its examples."""
        try:
            return "present" in signature(self.loss).parameters
        except ValueError:  # of a function written in C
            return False

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what travels of the model, parameters and buffers, by name."""
        return {name: tuple(shape) for name, (shape, _) in self.blueprint.travelling.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Types of what travels of the model, parameters and buffers, by name."""
        return {name: dtype for name, (_, dtype) in self.blueprint.travelling.items()}

    def torch_device(self) -> torch.device:
        """The device on which this process trains."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def initial_params(self, seed: int) -> Params:
        """Parameters and buffers of a fresh model; the same ones for the same seed, everywhere.

        What is frozen is not among them. Raises ValueError where all of the model is.
        """
        return self.blueprint.initial(seed)

    @property
    def fingerprint(self) -> str:
        """Of what is frozen, to be compared between nodes; empty where nothing is.

        It holds the model's and, where ``data`` has one as `Features` have, that of the data.
        """
        parts = (self.blueprint.fingerprint, getattr(self.data, "fingerprint", ""))
        return "-".join(part for part in parts if part)

    @property
    def blueprint(self) -> Blueprint:
        """The model's factory, and what is known of its frozen parts."""
        assert isinstance(self.model, Blueprint)
        return self.model


def _hashable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, wrapped if it is an object without a hash."""
    try:
        hash(function)
    except TypeError:
        return partial(function)
    return function
