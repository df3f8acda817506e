"""A model factory of which the parts that nobody trains are built once and shared.

Pretrained weights take longer to load than a small part of them takes to train. What is frozen is
no part of the parameters that train, travel and are kept (`Params`): each node has its own from its
own factory, and `Blueprint.fingerprint` tells whether two nodes have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property, lru_cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_ext.errors import InvalidValue
from flower_ext.training.params import Params, clone, matches, require_modules, shaken

_PARTS = "train real and imaginary parts as two parameters"
_MENDS = {
    torch.bfloat16: "build the model in float32 (model.float())",
    torch.complex64: _PARTS,
    torch.complex128: _PARTS,
}
"""Types that cannot travel, and what to do."""


class _Facts(NamedTuple):
    """The frozen part of a model, the parts that travel, and a model that others take parts of.

    Of tied parameters the first one travels.
    """

    frozen: Params
    travelling: Mapping[str, tuple[torch.Size, torch.dtype]]
    template: nn.Module | None


class Blueprint:
    """Builds modules of one architecture; those that have frozen parts share them.

    Parameters
    ----------
    factory : Callable[[], nn.Module]
        Builds a model. Where it draws random numbers, it does so from torch's own generator.
    trainable : Sequence[str], optional
        Names of the modules and parameters that train, where ``*`` stands for any part; all
        others are frozen. None leaves it to each parameter's ``requires_grad``.

    Raises
    ------
    ValueError
        A name of ``trainable`` is none of the model's, all parameters are frozen, or what travels
        is of a type that cannot (bfloat16, complex numbers); once a model is built.
    """

    def __init__(
        self, factory: Callable[[], nn.Module], trainable: Sequence[str] | None = None
    ) -> None:
        self.factory, self.trainable = factory, trainable
        self._last: tuple[int, Params] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Be the one blueprint of the factory again in a process that knows it: see `blueprint`."""
        return _known_again, (self.factory, self.trainable, vars(self))

    def __call__(self) -> nn.Module:
        """Return a model of one's own: only frozen parameters are those of others, too."""
        template = self._facts.template
        if template is None:
            return self._built()
        # Not the buffers: a model in training mode may write into them.
        weights = [p for p in template.parameters() if not p.requires_grad]
        return deepcopy(template, {id(weight): weight for weight in weights})

    def initial(self, seed: int) -> Params:
        """Return the parts of a fresh model that travel: trained parameters, and buffers."""
        if self._facts.template is None:
            return self._initial(seed)
        if self._last is None or self._last[0] != seed:  # a pretrained model is slow to load
            self._last = seed, self._initial(seed)
        return clone(self._last[1])

    def _initial(self, seed: int) -> Params:
        with seeded(seed, devices=torch.cuda.is_available()):
            state = self._built().state_dict()
        return clone({name: state[name] for name in self.travelling})

    def like_initial(self, seed: int) -> Params:
        """As `initial`, but for trials: a model that may take long to build is not built anew."""
        template = self._facts.template
        if template is None:
            return self.initial(seed)
        state = template.state_dict()
        moved = {name: state[name].detach() for name in self._facts.travelling}
        return clone(shaken(moved, torch.Generator().manual_seed(seed)))

    @property
    def travelling(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shapes and types of all that travels, by name."""
        return self._facts.travelling

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """All that neither trains nor travels, by name: not to be changed."""
        return self._facts.frozen

    @cached_property
    def fingerprint(self) -> str:
        """Of names, types, shapes and values of what is frozen; empty where nothing is."""
        return digest(self.frozen)[:16] if self.frozen else ""

    @cached_property
    def _facts(self) -> _Facts:
        with seeded(0, devices=torch.cuda.is_available()):
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
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in model.named_parameters()}
        state = model.state_dict()
        travelling = {
            name: (value.shape, value.dtype)
            for name, value in state.items()
            if name not in frozen and name not in tied
        }
        for name, (_, dtype) in travelling.items():
            if mend := _MENDS.get(dtype):
                raise InvalidValue(
                    f"{name!r} is of type {dtype}, in which nothing is sent or noised: expected "
                    f"float32 or float64; {mend}. What is frozen may be of any type"
                )
        # Buffers that do not travel are drawn once, as what is frozen is: each model has a copy.
        constant = frozen or any(name not in state for name, _ in model.named_buffers())
        return _Facts(frozen, travelling, model if constant else None)

    def _built(self) -> nn.Module:
        model = self.factory()
        if self.trainable is not None:
            names = [name for name, _ in model.named_parameters()]
            require_modules("trainable", self.trainable, names)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(matches(name, self.trainable))
        return model


def _known_again(
    factory: Callable[[], nn.Module],
    trainable: tuple[str, ...] | None,
    found_out: Mapping[str, Any],
) -> Blueprint:
    """Return a blueprint that was sent, with what is not yet known of it here."""
    known = blueprint(factory, trainable)
    for name, value in found_out.items():
        if vars(known).get(name) is None:
            vars(known)[name] = value
    return known


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def in_training(model: nn.Module) -> nn.Module:
    """Return a model in training mode, but for statistics that belong to frozen layers.

    Gradients of embeddings are as dense as all others, with which they are added up.
    """
    model.train()
    for module in model.modules():
        if is_frozen(module):
            module.training = False
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return model


def is_frozen(module: nn.Module) -> bool:
    """Return True if the buffers of a module are constants, as its parameters are."""
    parameters = [*module.parameters(recurse=False)]
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def blueprint(
    factory: Callable[[], nn.Module], trainable: tuple[str, ...] | None = None
) -> Blueprint:
    """Return the one blueprint of a factory: what is known of a model is asked for by it.

    Two `functools.partial` of equal parts are one factory, and so are one method of two equal
    objects: on Ray each message brings its own copy of them.
    """
    if isinstance(factory, Blueprint):
        if trainable in (None, factory.trainable):
            return factory
        factory = factory.factory
    if type(factory) is partial:
        with suppress(TypeError):  # arguments without a hash
            return _of_partial(
                factory.func, factory.args, frozenset(factory.keywords.items()), trainable
            )
    if isinstance(factory, MethodType):
        with suppress(TypeError):  # an object without a hash
            return _of_method(factory.__func__, factory.__self__, trainable)
    try:
        return _of_factory(factory, trainable)
    except TypeError:  # an object without a hash
        return Blueprint(factory, trainable)


@lru_cache(maxsize=64)
def _of_factory(factory: Callable[[], nn.Module], trainable: tuple[str, ...] | None) -> Blueprint:
    return Blueprint(factory, trainable)


@lru_cache(maxsize=64)
def _of_method(
    function: Callable[..., nn.Module], owner: Hashable, trainable: tuple[str, ...] | None
) -> Blueprint:
    return Blueprint(MethodType(function, owner), trainable)


@lru_cache(maxsize=64)
def _of_partial(
    function: Callable[..., nn.Module],
    arguments: tuple[Hashable, ...],
    keywords: frozenset[tuple[str, Hashable]],
    trainable: tuple[str, ...] | None,
) -> Blueprint:
    return Blueprint(partial(function, *arguments, **dict(keywords)), trainable)


@contextmanager
def seeded(seed: int, *, devices: bool) -> Iterator[None]:
    """Make all that torch draws by itself, as for dropout, follow from ``seed`` alone.

    Accelerators are seeded as well if ``devices`` is true: absent ones take ten times the rest.
    """
    former = torch.get_rng_state()
    (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
    try:
        yield
    finally:
        torch.set_rng_state(former)
