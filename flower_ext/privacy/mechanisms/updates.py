"""Checks, norms and sums of updates; an update is a mapping of names to arrays.

Arrays may be NumPy or torch, on any device: they are handled through the array API, without
importing torch. Norms are computed in float64, and scaled if needed, so that neither a huge value
nor half precision makes a norm wrong.
"""

import math
from collections.abc import Mapping
from typing import Any

import array_api_compat as api
import numpy as np

from flower_ext.errors import InvalidValue

NamedArrays = Mapping[str, Any]
"""Arrays of any library by name: one unit's contribution to a sum, or the sum itself."""


class NonFiniteUpdate(InvalidValue):
    """An update holds NaN or infinite values, so clipping cannot bound its norm."""


def check_arrays(update: NamedArrays) -> None:
    """Refuse an update unless all entries are real floating-point arrays, at least one not empty.

    Other entries cannot be bounded and noised, and the `TypeError` names the first of them.
    """
    for name, array in update.items():
        if isinstance(array, np.ma.MaskedArray):  # norms and noise would skip masked elements
            raise TypeError(f"{name!r} is a masked array; fill it first (array.filled(0.0))")
        if not (isinstance(array, np.ndarray) or api.is_array_api_obj(array)):
            raise TypeError(f"{name!r} is a {type(array).__name__}, not an array; convert it first")
        if isinstance(array, np.ndarray):  # same result as below, ten times as fast
            is_real_float = array.dtype.kind == "f"
        else:
            is_real_float = api.array_namespace(array).isdtype(array.dtype, "real floating")
        if not is_real_float:
            raise TypeError(
                f"{name!r} has dtype {array.dtype}; only real floating-point arrays can be bounded "
                "and noised. Leave counters and indices out of the update, or convert them."
            )
    if sum(math.prod(array.shape) for array in update.values()) == 0:
        raise InvalidValue("the update holds no numbers: name at least one non-empty array")


def l2_norm(update: NamedArrays) -> float:
    """Return the L2 norm over all arrays together, computed in float64.

    Raise `NonFiniteUpdate` with the name of an array that holds NaN or infinite values.
    """
    check_arrays(update)
    largest, scaled = scaled_norm(update)
    return largest * scaled


def in_float64(update: NamedArrays) -> dict[str, Any]:
    """Return copies of all arrays in float64."""
    return {name: as_float64(array) for name, array in update.items()}


def in_precision_of(like: NamedArrays, update: NamedArrays) -> dict[str, Any]:
    """Return arrays in the precision of ``like``; refuse numbers that are too large for it."""
    rounded = {}
    with np.errstate(over="ignore"):
        for name, array in update.items():
            rounded[name] = api.array_namespace(array).astype(array, like[name].dtype)
            if not is_finite(rounded[name]):
                raise NonFiniteUpdate(
                    f"{name!r} is not finite in {like[name].dtype}: use a wider precision"
                )
    return rounded


class RunningSum:
    """Sum of updates in float64. Add each update when it arrives; no update is kept.

    Parameters
    ----------
    like : NamedArrays
        Arrays with the names and shapes of the updates, and the types of the released average.

    Attributes
    ----------
    value : dict[str, array]
    count : int
        Number of added updates.
    bound : float
        Upper bound on the norm of every added update; infinite if the sum does not clip updates.
    cell : float, optional
        Step of a public grid, if ``value`` counts such steps in whole numbers.

    Raises
    ------
    InvalidValue
        ``like`` is empty.
    """

    bound: float = math.inf
    cell: float | None = None

    def __init__(self, like: NamedArrays) -> None:
        if not like:
            raise InvalidValue("like={}: expected at least one array")
        self.like, self.count = like, 0
        self.value: dict[str, Any] = {}
        for name, array in like.items():
            xp, shape = api.array_namespace(array), tuple(array.shape)
            self.value[name] = xp.zeros(shape, dtype=xp.float64, device=api.device(array))

    def add(self, update: NamedArrays) -> None:
        """Add an update; refuse names or shapes that differ from those of ``like``."""
        check_like(update, self.like)
        for name, array in self.value.items():
            array += update[name]
        self.count += 1


def check_like(update: NamedArrays, like: NamedArrays, *, types: bool = False) -> None:
    """Refuse an update whose names or shapes differ from ``like``; with ``types``, types as well.

    The message shows names, shapes and types, but no numbers of the update.
    """

    def form(array: Any) -> str:
        return f"shape {tuple(array.shape)}" + (f" and type {array.dtype}" if types else "")

    if set(update) != set(like):
        missing, unexpected = sorted(set(like) - set(update)), sorted(set(update) - set(like))
        raise InvalidValue(f"array names differ: missing {missing}, unexpected {unexpected}")
    for name, expected in like.items():
        array = update[name]
        if tuple(array.shape) != tuple(expected.shape) or (types and array.dtype != expected.dtype):
            raise InvalidValue(f"{name!r} has {form(array)}: expected {form(expected)}")


def is_finite(array: Any) -> bool:
    """Return True if no number of an array is NaN or infinite; always True for integers."""
    # A sum is much faster than a test of each number. If it is finite, so are all numbers.
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "fc":  # texts have no sum
            return True
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
    if math.isfinite(array.sum()):
        return True
    namespace = api.array_namespace(array)
    return bool(namespace.all(namespace.isfinite(array)))


def require_finite(update: NamedArrays, where: str, remedy: str) -> None:
    """Refuse arrays with NaN or infinite values.

    The message names the first such array, and repeats ``where`` and ``remedy``.
    """
    for name, array in update.items():
        if not is_finite(array):
            raise NonFiniteUpdate(
                f"{name!r} holds NaN or infinite values {where}: expected finite numbers; {remedy}"
            )


def as_float64(array: Any) -> Any:
    """Return a copy of an array in float64."""
    namespace = api.array_namespace(array)
    return namespace.astype(array, namespace.float64)


def flat_rows(rows: NamedArrays) -> dict[str, Any]:
    """Return copies in float64 of arrays of shape (rows, …); each row becomes flat."""
    return {
        name: api.array_namespace(array).reshape(
            as_float64(array), (array.shape[0], math.prod(array.shape[1:]))
        )
        for name, array in rows.items()
    }


def split_into(shapes: Mapping[str, tuple[int, ...]], flat: np.ndarray) -> dict[str, np.ndarray]:
    """Return consecutive parts of a flat array as arrays of the given shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {
        name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def scaled_norm(update: NamedArrays) -> tuple[float, float]:
    """Return two factors whose product is the L2 norm.

    The first factor is 1 or, if squares would overflow or underflow, the largest magnitude.
    """
    wide = in_float64(update)
    if 1e-100 < (norm := plain_norm(wide)) < 1e100:
        return 1.0, norm
    require_finite(update, "before clipping", "check the data, and whether training diverged")
    magnitudes = (
        float(api.array_namespace(array).max(abs(array)))
        for array in wide.values()
        if math.prod(array.shape)
    )
    largest = max(magnitudes, default=0.0)
    if largest == 0.0:
        return 0.0, 0.0
    return largest, plain_norm({name: array / largest for name, array in wide.items()})


def plain_norm(wide: NamedArrays) -> float:
    """Return the L2 norm of all float64 arrays together.

    It is inf or NaN if squares overflow, and 0 if they underflow.
    """
    flat = [array.reshape(-1) for array in wide.values()]
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(array @ array) for array in flat))


def divided(summed: NamedArrays, by: float, like: NamedArrays) -> dict[str, Any]:
    """Divide a sum; return the average in the precision of ``like``."""
    return {
        name: api.array_namespace(array).astype(array / by, like[name].dtype)
        for name, array in summed.items()
    }
