"""Check that a model may be shared, before a client receives it."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages.records import Arrays, read_array, to_arrays
from flower_ext.training import UnshareableModel, matches
from flower_ext.training.models.validation import RUNNING_STATISTICS
from flower_ext.training.params import require_modules

log = getLogger("flwr")

_FEWEST_RANDOM = 8
"""An array counts as random if it has more distinct values than half of its size, and than half of
this constant. If two random arrays are equal, one counts as a copy of the other."""


def shared_arrays(record: ArrayRecord, personal: Sequence[str] = ()) -> Arrays:
    """Return those arrays of a whole initial model that clients share.

    Clients do not share the modules ``personal``. Refuse a misspelt name of a module. Refuse a
    shared array that is not floating-point (a counter, an index), has half precision, or is a
    running statistic.
    """
    _check_personal(personal, sorted(record))
    shared = {name: array for name, array in record.items() if not matches(name, personal)}
    if not shared:
        raise InvalidValue(
            f"personal={personal}: expected names that leave at least one parameter shared"
        )
    arrays = {name: read_array(array) for name, array in shared.items()}
    refuse_half_precision(arrays)
    remedy = (
        "leave it out of the initial arrays. With a Task, compute a constant in the forward pass, "
        "or set personal=({!r},) if the method has personal parts; with your own ClientApp, load "
        "the model with strict=False"
    )
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in RUNNING_STATISTICS:
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


def _check_personal(personal: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a misspelt name in ``personal``; only log other names that the model lacks."""
    modules = {name.rsplit(".", 1)[0] for name in names} | {*names}
    unknown = [p for p in personal if not any(matches(name, [p]) for name in names)]
    if len(unknown) < len(personal):
        require_modules("personal", personal, names)
    for prefix in unknown:
        # A name that differs only in its number is no typing error: the server's model may
        # lack that layer.
        near = get_close_matches(prefix, modules)
        alike = [n for n in near if re.sub(r"\d", "", n) != re.sub(r"\d", "", prefix)]
        if any(f".{prefix}." in f".{name}." for name in names):
            alike = [f"*.{prefix}"]
        if alike:
            raise InvalidValue(
                f"personal={prefix!r}: expected the name of a part of the model; did you mean "
                f"{alike[0]!r}? Clients share every part that personal does not name. If a "
                "parameter is tied, give the first of its names"
            )
        log.warning("personal=%r matches no parameter of the model: %s", prefix, names)


def refuse_tied(record: ArrayRecord) -> None:
    """Refuse initial arrays in which one parameter has two names, as tied parameters have.

    Noise would make the two arrays differ, and norms would count the parameter twice. Arrays do not
    show that they are tied, so the function looks for arrays with equal random numbers. It only
    logs a warning if the two names differ in nothing but numbers, as in copies of a layer.
    """
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for name, array in to_arrays(record).items():
        if 2 * len(np.unique(array)) <= max(array.size, _FEWEST_RANDOM):
            continue  # constants, such as zeros and ones, may be equal by chance
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        other = first.setdefault((str(array.dtype), array.shape, content), name)
        if other == name:
            continue
        tie = f"{name!r} has the same initial numbers as {other!r}, as if tied to it"
        fix = (
            f"leave {name!r} out of the initial arrays, and let the ClientApp load the model with "
            "strict=False, which fills both; parameters that are not tied must have different "
            "initial numbers"
        )
        # Layers may begin as copies of one layer, as in ``nn.TransformerEncoder``.
        if re.sub(r"\d+", "", name) == re.sub(r"\d+", "", other):
            log.warning("%s. If they are tied, noise makes them differ: %s", tie, fix)
            continue
        raise UnshareableModel(f"{tie}; noise would make the two arrays differ: {fix}")


def refuse_half_precision(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse half precision: it is too coarse for the grid on which noised uploads add up."""
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating) and array.dtype.itemsize < 4:
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}, which cannot be sent under noise: expected "
                "float32 or float64; build the model in float32 (model.float())"
            )
