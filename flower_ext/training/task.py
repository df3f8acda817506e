"""The task that every method trains: the model, loss, metrics, and the data of each partition."""

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
from flower_ext.training.isolation import default_device
from flower_ext.training.models.factory import ModelFactory, factory_of
from flower_ext.training.params import Params


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of rows of ``outputs`` (n, classes) whose largest entry is the target.

    Raises
    ------
    ValueError
        Outputs or targets are not a single tensor, or targets are not class numbers.
    """
    for name, tree in (("outputs", outputs), ("targets", targets)):
        if not isinstance(tree, Tensor):
            raise InvalidValue(
                f"accuracy with {name} of type {type(tree).__name__}: expected one tensor. Give "
                "Task(metrics={...}) a metric that reads your type, such as lambda outputs, "
                "targets: accuracy(outputs.logits, targets)"
            )
    if targets.is_floating_point():
        raise InvalidValue(
            f"accuracy with targets of type {targets.dtype}: expected class numbers. Give "
            "Task(metrics={...}) a metric that suits your targets"
        )
    return float((outputs.argmax(dim=1) == targets).float().mean())


@dataclass(frozen=True, kw_only=True)
class Task:
    """A federated learning problem.

    Parameters
    ----------
    model : Callable[[], nn.Module]
        Builds a fresh model. All models that the function builds must have the same architecture
        and settings, because the first model's properties are reused for the others. Use another
        function for other settings. `Examples` says with which arguments the model is called. The
        option ``personal`` of a method lists names of this model's modules or parameters.
        Parameters without ``requires_grad`` are frozen: they do not train, are not sent, and do not
        count in a norm. Every node takes them from its own ``model()``, and the buffers of frozen
        layers stay constant.
    data : Callable[[int], ClientData]
        Returns training and test examples of partition ``i``.
    loss : Callable[..., Tensor]
        Mean loss of a batch, from the model's outputs (of any type) and the targets. A loss that is
        not a mean over examples has a third parameter ``present``: booleans that distinguish
        examples from padding.
    metrics : Mapping[str, Callable[[Any, Any], float]]
        Quality measures by name. Each is a function of the model's outputs for all test examples of
        a client, and of their targets. If a client has several mini-batches, outputs must be
        tensors with one row per example, or tuples, mappings or dataclasses of such tensors (see
        `evaluate`).
    device : str
        ``"auto"`` uses a CUDA device if there is one.
    trainable : Sequence[str], optional
        Names of the modules or parameters that train; ``*`` matches any part of a name. All
        others are frozen, whatever their ``requires_grad``. For example, ``("*.lora_B",
        "*.modules_to_save")`` is FFA-LoRA (Sun et al. 2024), which trains only the second matrices
        of adapters.
    draw_key : bytes, optional
        Secret that all silos share and the server does not have (``flower-ext link key`` makes
        one). With ``UldpAvg(user_draw="silos")``, silos draw the users of a round from this key.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], ClientData]
    loss: Callable[..., Tensor] = functional.cross_entropy
    metrics: Mapping[str, Callable[[Any, Any], float]] = field(
        default_factory=lambda: {"accuracy": accuracy}
    )
    device: str = "auto"
    trainable: Sequence[str] | None = None
    draw_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise TypeError(
                f"model is a {type(self.model).__name__}: expected a function that builds one"
            )
        if not callable(self.data):
            raise TypeError(
                f"data is a {type(self.data).__name__}: expected a function that takes a "
                "partition's number and returns its ClientData"
            )
        if isinstance(self.trainable, str):
            raise InvalidValue(
                f"trainable={self.trainable!r}: expected a tuple of names, for example "
                f"({self.trainable!r},)"
            )
        try:
            hash(self.loss)
        except TypeError:  # caches need a hash
            object.__setattr__(self, "loss", partial(self.loss))
        trainable = None if self.trainable is None else tuple(self.trainable)
        object.__setattr__(self, "trainable", trainable)
        object.__setattr__(self, "model", factory_of(self.model, trainable))

    @property
    def compares_examples(self) -> bool:
        """True if the loss of a batch is not a mean over its examples."""
        try:
            return "present" in signature(self.loss).parameters
        except ValueError:  # a function written in C has no signature
            return False

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters and buffers that are sent between nodes, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.template.items()}

    @property
    def template(self) -> Params:
        """Tensors without values, with the names, shapes and types of the tensors that are sent."""
        return self.factory.facts.travelling

    def torch_device(self) -> torch.device:
        """Return the device on which this process trains."""
        return default_device() if self.device == "auto" else torch.device(self.device)

    def initial_params(self, seed: int) -> Params:
        """Return parameters and buffers of a fresh model, the same everywhere for the same seed.

        Frozen tensors are left out. Raises ValueError if the whole model is frozen.
        """
        return self.factory.initial(seed)

    @property
    def fingerprint(self) -> str:
        """Digest of the frozen parts of model and data, which the server compares between nodes.

        It is empty if nothing is frozen. If a frozen model computed the data, the attribute
        ``fingerprint`` of the function ``data`` identifies this model.
        """
        parts = (self.factory.fingerprint, getattr(self.data, "fingerprint", ""))
        return "-".join(part for part in parts if part)

    @property
    def factory(self) -> ModelFactory:
        """The factory that builds the models, and that knows which of their tensors are frozen."""
        assert isinstance(self.model, ModelFactory)
        return self.model
