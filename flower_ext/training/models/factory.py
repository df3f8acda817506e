"""Model factories whose frozen parts are built once and shared.

Loading pretrained weights takes longer than training a small part of them, so each process loads
them once. Frozen tensors are not among the parameters that nodes train, send and store (`Params`).
Each node takes them from its own factory, and `ModelFactory.fingerprint` shows whether two nodes
have the same frozen tensors.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from io import BytesIO
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import default_device, seeded
from flower_ext.training.params import Params, clone, matches, require_modules, shaken

_PARTS = "train real and imaginary parts as two parameters"
_WIDER = "build the model in float32 (model.float())"
_REMEDIES = {
    torch.float16: _WIDER,
    torch.bfloat16: _WIDER,
    torch.complex64: _PARTS,
    torch.complex128: _PARTS,
}
"""Types that nodes cannot send, with remedies. In half precision, sums would lose noise."""
_PLAIN_MODULES = (
    "torch.nn.modules.",
    "flower_ext.training.models.architectures",
    "flower_ext.training.models.dropout",
)
_PLAIN_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class ModelFacts(NamedTuple):
    """Facts about the models of one factory, found from the first model."""

    frozen: Params
    """Frozen parameters, and buffers of frozen layers; the caller must not change them."""
    tied: Mapping[str, str]
    """Maps each further name of a tied parameter to its first name, under which nodes send it."""
    travelling: Params
    """The tensors that nodes send, trained parameters and buffers, without their values."""
    known: bool
    """True if all layers are *known*: layers of PyTorch or this package, with nothing added."""
    known_holders: bool
    """True if all layers with parameters or buffers of their own are known."""
    template: nn.Module | None
    """A model whose frozen parts all models share; None if nodes send all tensors."""

    def serves_in_turn(self, params: Mapping[str, Tensor]) -> bool:
        """Return True if one model object may serve several clients in turn.

        All layers must be known, so that no layer keeps values of a client. ``params``, the tensors
        that one client sets, must have all names and the usual shapes. Otherwise the model would
        keep a missing tensor of the previous client.
        """
        return self.known and all(
            name in params and params[name].shape == tensor.shape
            for name, tensor in self.travelling.items()
        )


class ModelFactory:
    """Factory of modules of one architecture, which share their frozen parts.

    ``function`` builds a model. Its random numbers must come from torch's own generator.
    ``trainable`` names the modules and parameters that train, as in `Task`. The first call that
    builds a model refuses a name that matches nothing, a model without trained parameters, and a
    tensor of a type that nodes cannot send (half precision, complex numbers).
    """

    def __init__(
        self, function: Callable[[], nn.Module], trainable: Sequence[str] | None = None
    ) -> None:
        self.function, self.trainable = function, trainable
        self._last: tuple[int, Params] | None = None
        self._templates: dict[torch.device, _Template] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle to the factory that `factory_of` returns in the receiving process."""
        return factory_of, (self.function, self.trainable)

    def __call__(self) -> nn.Module:
        """Return an independent model; only frozen parameters are shared with other models."""
        return self.on(torch.device("cpu"))

    def on(self, device: torch.device) -> nn.Module:
        """Return an independent model on a device. All models there share frozen parameters.

        Do not move the model to another device: the shared frozen parameters would move with it.
        """
        if self.facts.template is None:
            return self._built().to(device)
        if device not in self._templates:
            self._templates[device] = _Template(deepcopy(self.facts.template).to(device))
        return self._templates[device].copy()

    def initial(self, seed: int) -> Params:
        """Return trained parameters and buffers of a fresh model: the tensors that nodes send."""
        last = self._last
        if last is None or last[0] != seed:  # a pretrained model loads slowly
            with seeded(seed, default_device()):
                state = self._built().state_dict()
            last = self._last = seed, clone({name: state[name] for name in self.facts.travelling})
        return clone(last[1])

    def like_initial(self, seed: int) -> Params:
        """Return random parameters for trials, with the names and shapes of `initial`.

        A pretrained model loads slowly, so the function adds random numbers to the parameters of
        the first model that was built.
        """
        template = self.facts.template
        if template is None:
            return self.initial(seed)
        state = template.state_dict()
        moved = {name: state[name].detach() for name in self.facts.travelling}
        return clone(shaken(moved, torch.Generator().manual_seed(seed)))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the frozen tensors' names, types, shapes and values; empty if none exist."""
        return digest(self.facts.frozen)[:16] if self.facts.frozen else ""

    @cached_property
    def facts(self) -> ModelFacts:
        """Properties of the models. The first access builds a model to find them."""
        with seeded(0, default_device()):
            model = self._built()
        parameters = [*model.parameters()]
        if parameters and not any(p.requires_grad for p in parameters):
            raise InvalidValue(
                "all parameters of the model are frozen: leave requires_grad of some True, or "
                "name those that train in Task(trainable=...)"
            )
        frozen: Params = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        for name, module in model.named_modules():
            if is_frozen(module):
                for leaf, buffer in module.named_buffers(recurse=False):
                    frozen[f"{name}.{leaf}".removeprefix(".")] = buffer
        tied = tied_names(model)
        state = model.state_dict()
        travelling = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in state.items()
            if name not in frozen and name not in tied
        }
        for name, tensor in travelling.items():
            if remedy := _REMEDIES.get(tensor.dtype):
                raise InvalidValue(
                    f"{name!r} has type {tensor.dtype}, which cannot be sent under noise: expected "
                    f"float32 or float64; {remedy}. Frozen tensors may have any type"
                )
        holders = [module for module in model.modules() if module._parameters or module._buffers]
        known, known_holders = (all(map(_is_plain, part)) for part in (model.modules(), holders))
        # Buffers that are not sent are drawn once, like frozen tensors; each model has a copy.
        constant = frozen or any(name not in state for name, _ in model.named_buffers())
        template = model if constant else None
        if template is not None:
            self._templates[torch.device("cpu")] = _Template(template)
        return ModelFacts(frozen, tied, travelling, known, known_holders, template)

    def _built(self) -> nn.Module:
        model = self.function()
        if self.trainable is not None:
            names = [name for name, _ in model.named_parameters()]
            require_modules("trainable", self.trainable, names, tied_names(model))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(matches(name, self.trainable))
        return model


class _Template:
    """A model whose copies share its frozen parameters, and nothing else.

    Buffers are copied, because a model in training mode may write into them. Copies come from a
    pickle, because `deepcopy` of a transformer takes longer than a training step of a small one.
    Models that cannot be pickled, such as those with local functions as hooks, are copied by
    `deepcopy`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self._tensors: list[Tensor] = []
        written = BytesIO()
        pickler = pickle.Pickler(written, protocol=5)
        pickler.persistent_id = self._number_of  # type: ignore[method-assign]
        try:
            pickler.dump(model)
            self._pickled = written.getvalue()
        except Exception:  # an object may refuse with any error
            self._pickled = b""

    def _number_of(self, value: Any) -> int | None:
        """Keep a tensor out of the pickle; return the number that stands for it in the pickle."""
        if not isinstance(value, Tensor):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def copy(self) -> nn.Module:
        """Return a copy."""
        memo: dict[int, Any] = dict(self._frozen)
        if not self._pickled:
            return deepcopy(self.model, memo)
        unpickler = pickle.Unpickler(BytesIO(self._pickled))
        tensors = [deepcopy(tensor, memo) for tensor in self._tensors]
        unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
        copied: nn.Module = unpickler.load()
        return copied


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    firsts = {name: first.setdefault(id(parameter), name) for name, parameter in names}
    return {name: other for name, other in firsts.items() if name != other}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def in_training(model: nn.Module) -> nn.Module:
    """Switch all layers that are not frozen to training mode, and return the model.

    Frozen layers therefore keep their running statistics. Embeddings no longer return sparse
    gradients, because this package adds up dense tensors.
    """
    model.train()
    for module in model.modules():
        if is_frozen(module):
            module.training = False
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return model


def is_frozen(module: nn.Module) -> bool:
    """Return True if a module has parameters and none trains; its buffers stay constant, too."""
    parameters = [*module.parameters(recurse=False)]
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def factory_of(
    function: Callable[[], nn.Module], trainable: tuple[str, ...] | None = None
) -> ModelFactory:
    """Return the factory of a function: the same object in every call for the same function.

    Two `functools.partial` objects count as the same function if their functions and arguments are
    equal. Two bound methods count as the same function if their objects are equal, because on Ray
    each message brings its own copy of the object.
    """
    if isinstance(function, ModelFactory):
        if trainable in (None, function.trainable):
            return function
        function = function.function
    try:
        return _factory_by(_Key(_identity(function), trainable, function))
    except TypeError:  # an object without a hash
        return ModelFactory(function, trainable)


def _identity(function: Callable[[], nn.Module]) -> Hashable:
    """Return a value that is the same for functions that `factory_of` treats as equal."""
    with suppress(TypeError):  # a part without a hash
        # A subclass of partial may do more than its parts say.
        if type(function) is partial:
            parts = function.func, function.args, frozenset(function.keywords.items())
            hash(parts)
            return parts
        if isinstance(function, MethodType):
            hash(function.__self__)
            return function.__func__, function.__self__
    return function


@dataclass(frozen=True)
class _Key:
    identity: Hashable
    trainable: tuple[str, ...] | None
    function: Callable[[], nn.Module] = field(compare=False)


@lru_cache(maxsize=128)
def _factory_by(key: _Key) -> ModelFactory:
    return ModelFactory(key.function, key.trainable)


def suits_channels_last(model: nn.Module, trained: Collection[str]) -> bool:
    """Return True if convolutions may have their channels last, which is faster on a CPU.

    With channels last, PyTorch crashes in the backward pass of `nn.GroupNorm` unless its input
    needs a gradient. The input needs a gradient if the first layer is a trained convolution.
    """
    modules = [*model.modules()]
    if not any(isinstance(module, nn.GroupNorm) for module in modules):
        return any(isinstance(module, nn.Conv2d) for module in modules)
    with_parameters = ((n, m) for n, m in model.named_modules() if [*m.parameters(recurse=False)])
    name, first = next(with_parameters, ("", None))
    return isinstance(first, nn.Conv2d) and f"{name}.weight".removeprefix(".") in trained


def _is_plain(module: nn.Module) -> bool:
    """Return True for a layer of PyTorch or this package with nothing added, such as a hook."""
    tensors_and_children = ("_modules", "_parameters", "_buffers")
    if not type(module).__module__.startswith(_PLAIN_MODULES):
        return False
    for key, value in vars(module).items():
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        parts = parts if isinstance(parts, tuple | list | set) else [parts]
        if key not in tensors_and_children and any(type(p) not in _PLAIN_VALUES for p in parts):
            return False
    return True
