"""Check that a model may be shared, before a client receives it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord

from flower_ext.federation.arrays import Arrays, to_arrays
from flower_ext.training import UnshareableModel

log = getLogger("flwr")

_FEWEST_RANDOM = 8
"""Fewest numbers, at least half of them different, that are equal only if one is a copy."""


def shared_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a model that may be shared.

    Raises
    ------
    UnshareableModel
        An array is not floating-point (a counter, an index), has half precision or is a running
        statistic; the message names it.
    """
    arrays = to_arrays(record)
    refuse_half_precision(arrays)
    remedy = (
        "leave it out of the initial arrays. In the model of a Task, compute a constant in the "
        "forward pass, or make it personal=({!r},) if the method has personal parts; a ClientApp "
        "of your own loads the model with strict=False"
    )
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in {"running_mean", "running_var", "num_batches_tracked"}:
            raise UnshareableModel(
                f"{name!r} is a BatchNorm statistic of the clients' data; neither clipping nor "
                f"noise covers it. Use GroupNorm in layer {layer!r} "
                f"(flower_ext.training.replace_batch_norm), or {remedy.format(layer or name)}"
            )
        if not np.issubdtype(array.dtype, np.floating):
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}; only floating-point arrays can be shared: "
                f"{remedy.format(name)}"
            )
    return arrays


def refuse_tied(record: ArrayRecord) -> None:
    """Refuse initial arrays in which one parameter has two names, as a ``state_dict`` has it.

    Noise would drive the two apart, and norms would count them twice. Arrays show no tie, but equal
    random numbers do. Layers that begin as copies of one layer, as in ``nn.TransformerEncoder``,
    have names that differ in numbers only; for them a warning has to do.

    Raises
    ------
    UnshareableModel
        The message names both.
    """
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for name, array in to_arrays(record).items():
        if 2 * len(np.unique(array)) <= max(array.size, _FEWEST_RANDOM):
            continue  # constants, such as zeros and ones, may be equal by chance
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        other = first.setdefault((str(array.dtype), array.shape, content), name)
        if other == name:
            continue
        tie = f"{name!r} begins with the numbers of {other!r}, as if tied to it"
        fix = (
            f"leave {name!r} out of the initial arrays, and let the ClientApp load the model with "
            "strict=False, which fills both; parameters that are not tied must begin apart"
        )
        if re.sub(r"\d+", "", name) == re.sub(r"\d+", "", other):
            log.warning("%s. If they are tied, noise drives them apart: %s", tie, fix)
            continue
        raise UnshareableModel(f"{tie}; noise would drive the two apart: {fix}")


def refuse_half_precision(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays in which noised uploads do not add up on a common grid.

    Raises
    ------
    UnshareableModel
        An array has less than single precision; the message names it.
    """
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating) and array.dtype.itemsize < 4:
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}, which cannot be sent under noise: expected "
                "float32 or float64; build the model in float32 (model.float())"
            )
