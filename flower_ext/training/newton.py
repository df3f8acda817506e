"""The exact minimiser of a small strongly convex problem, by Newton's method in float64.

Some privacy proofs use the stability of a minimiser, or the density of a perturbed minimiser. They
need the minimiser itself, not the result of some epochs of SGD. If the objective is μ-strongly
convex, a point whose gradient has norm g lies within g/μ of the minimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.params import Params

MOST_PARAMETERS = 4096
_MOST_ITERATIONS = 100


class NotConverged(ArithmeticError):
    """Newton's method found no point whose gradient's norm is within the tolerance."""


def newton(
    loss_at: Callable[[Params, Tree, Tree], Tensor],
    start: Mapping[str, Tensor],
    examples: Examples,
    *,
    tolerance: float,
) -> Params:
    """Return a point where the gradient of ``loss_at(params, x, y)`` has norm ≤ ``tolerance``.

    Parameters
    ----------
    start : Mapping[str, Tensor]
        float64, at most 4,096 numbers in all, because a step solves for the whole Hessian.
    tolerance : float
        Largest L2 norm of the gradient over all examples.

    Raises
    ------
    NotConverged
        The method does not reach such a point, because the objective is not strongly convex, or
        because ``tolerance`` is below the resolution of float64.
    ValueError
        There are too many parameters.
    """
    names, shapes = list(start), [p.shape for p in start.values()]
    sizes = [p.numel() for p in start.values()]
    if sum(sizes) > MOST_PARAMETERS:
        raise InvalidValue(
            f"tolerance above 0 with {sum(sizes)} parameters: Newton's method takes at most "
            f"{MOST_PARAMETERS}; train by SGD (tolerance=0)"
        )
    x = trees.double(examples.features)

    def parts(flat: Tensor) -> Params:
        cut = torch.split(flat, sizes)
        return {
            name: part.view(shape) for name, part, shape in zip(names, cut, shapes, strict=True)
        }

    def loss(flat: Tensor) -> Tensor:
        return loss_at(parts(flat), x, examples.targets)

    point = torch.cat([p.detach().reshape(-1) for p in start.values()])
    norm = math.inf
    for _ in range(_MOST_ITERATIONS):
        slope, value = torch.func.grad_and_value(loss)(point)
        norm = float(torch.linalg.vector_norm(slope))
        if norm <= tolerance:
            return parts(point)
        step, failed = torch.linalg.solve_ex(torch.func.hessian(loss)(point), slope)
        descent = float(slope @ step)
        if bool(failed) or not descent > 0:
            break
        # Armijo's rule, with a tolerance for the rounding of the values.
        length, slack = 1.0, 1e-14 * (1 + abs(float(value)))
        while float(loss(point - length * step)) > float(value) - 1e-4 * length * descent + slack:
            length /= 2
        point = point - length * step
    raise NotConverged(
        f"the gradient's norm stays at {norm:.3g}, above tolerance={tolerance:g}: expected a "
        "strongly convex objective; set proximal_weight above 0, or raise the tolerance"
    )
