"""Local objectives: a loss plus terms.

A term is any function of the parameters being trained. Terms add up, so a method composes its
objective instead of writing another training loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flower_ext.checks import require_not_negative
from flower_ext.errors import InvalidValue


class Term(Protocol):
    """A differentiable addition to the loss."""

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term (a scalar) at ``params``, the parameters being trained."""
        ...


@dataclass(frozen=True, kw_only=True)
class Proximal:
    """(weight / 2) ‖w − anchor‖², over the names that are trained (FedProx, Ditto)."""

    weight: float
    anchor: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        require_not_negative("weight", self.weight)

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term at ``params``."""
        squares = [
            (p - self.anchor[name].to(p.device)).square().sum() for name, p in params.items()
        ]
        return 0.5 * self.weight * torch.stack(squares).sum()


@dataclass(frozen=True, kw_only=True)
class Linear:
    """⟨direction, w⟩, over the trained names (objective perturbation, control variates)."""

    direction: Mapping[str, Tensor]

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the term at ``params``."""
        products = [(p * self.direction[name].to(p.device)).sum() for name, p in params.items()]
        return torch.stack(products).sum()


def affine(terms: Sequence[Term]) -> Iterator[tuple[float, float, Mapping[str, Tensor]]]:
    """Yield slope, scale and vector of each term, whose gradient is slope · w + scale · vector."""
    for term in terms:
        if type(term) is Proximal:  # a subclass may be another function
            yield term.weight, -term.weight, term.anchor
        elif type(term) is Linear:
            yield 0.0, 1.0, term.direction
        else:
            raise InvalidValue(f"{type(term).__name__}: expected Proximal or Linear")
