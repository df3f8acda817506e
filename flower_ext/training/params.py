"""Model parameters as plain dictionaries, the form in which they are trained, sent and stored."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from flower_ext.errors import InvalidValue

Params = dict[str, Tensor]
"""Tensors of parameters and buffers, by their names in the model."""
Sizes = tuple[tuple[str, torch.Size], ...]


def clone(params: Mapping[str, Tensor]) -> Params:
    """Return detached copies of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def to_device(params: Mapping[str, Tensor], device: torch.device) -> Params:
    """Return the same parameters on ``device``."""
    return {name: tensor.to(device) for name, tensor in params.items()}


def flat_rows(stack: Tensor) -> Tensor:
    """Return a stack of tensors as a matrix, one row per tensor. Tensors may be scalars."""
    return stack.unsqueeze(-1).flatten(1)


def difference(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Params:
    """Return ``after − before`` for every name of ``after``.

    Raises
    ------
    ValueError
        ``before`` lacks a name.
    """
    if not after.keys() <= before.keys():
        missing = sorted(after.keys() - before.keys())
        raise InvalidValue.tellable(
            f"difference: the trained model has {missing}, which the received model lacks; "
            "give only the received part: {name: after[name] for name in before}"
        )
    return {name: after[name] - before[name] for name in after}


def shaken(params: Mapping[str, Tensor], generator: torch.Generator) -> Params:
    """Return the parameters plus random numbers that are as large as usual initial weights.

    Trials need them: a head that begins at zero would give the same output for all examples.
    """
    moved = dict(params)
    for name, weight in params.items():
        if weight.is_floating_point():
            scale = max(1, math.prod(weight.shape[1:])) ** -0.5 if weight.dim() > 1 else 0.1
            moved[name] = weight + scale * torch.randn(weight.shape, generator=generator).to(weight)
    return moved


def sizes(params: Mapping[str, Tensor]) -> Sizes:
    """Return all names and shapes. Caches use them to distinguish the models of one factory."""
    return tuple((name, tensor.shape) for name, tensor in params.items())


def tagged(tag: str, params: Mapping[str, Tensor]) -> Params:
    """Return the same parameters with ``tag`` before each name, to combine several models."""
    return {f"{tag}/{name}": tensor for name, tensor in params.items()}


def untagged(params: Mapping[str, Tensor], tag: str) -> Params:
    """Return the parameters to whose names `tagged` added ``tag``, by their original names."""
    start = f"{tag}/"
    return {n.removeprefix(start): tensor for n, tensor in params.items() if n.startswith(start)}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a parameter belongs to one of the modules (or parameters) of ``patterns``.

    In a pattern, ``*`` matches any part of a name: ``"*.lora_B"`` matches every module ``lora_B``,
    wherever it is.
    """
    for pattern in patterns:
        if name == pattern or name.startswith(f"{pattern}."):
            return True
        if "*" in pattern and (fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")):
            return True
    return False


def require_modules(
    option: str,
    patterns: Sequence[str],
    names: Iterable[str],
    tied: Mapping[str, str] | None = None,
) -> None:
    """Refuse ``patterns`` if one of them matches no parameter among ``names``.

    The error names ``option``, the option that has the value ``patterns``.

    ``tied`` maps each further name of a parameter to its first name, for example
    ``{"head.weight": "embedding.weight"}``. ``"head"`` is then refused without ``"embedding"``.
    """
    for name, first in (tied or {}).items():
        if matches(name, patterns) and not matches(first, patterns):
            raise InvalidValue(
                f"{option}={tuple(patterns)} names {name!r}, which is tied to {first!r}: both "
                "names mean one parameter; give both names, or neither"
            )
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            modules = sorted({name.rpartition(".")[0] or name for name in names})
            raise InvalidValue(
                f"{option}={pattern!r} names no parameter of this model; expected some of "
                f"{modules} (tied parameters are listed by their first name only)"
            )
