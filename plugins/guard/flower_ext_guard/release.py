"""Bound and noise the update in an app's answer, whatever the answer is.

An app may be hostile, and its answer may depend on the data in any way. So the guard turns every
answer into an update of norm at most C, and a missing or unusable answer into a zero update. It
adds the noised update to the arrays of the request, which the server knows.

Guarantees
----------
Let z be the noise multiplier. A reply is a vector of norm at most C plus Gaussian noise of standard
deviation z·C. Between any two data sets of the site, and any two behaviours of the app, the vector
differs by at most 2 C. The relation is thus *replace-one*, the unit is the site, and the noise is
z/2 times the sensitivity. Releases compose adaptively, so an app's memory of earlier messages
changes nothing.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from flower_ext.federation.messages.records import Arrays, to_arrays
from flower_ext.privacy import NoiseSource, clip
from flower_ext.privacy.mechanisms.updates import NonFiniteUpdate, check_like
from flower_ext_guard.policy import MessagePolicy, Refused


def requested_arrays(record: ArrayRecord | None, policy: MessagePolicy) -> Arrays:
    """Return the arrays of a request; refuse it if the policy lets an app update none of them."""
    if record is None:
        raise Refused("this site answers only messages with exactly one ArrayRecord")
    try:
        arrays = to_arrays(record)
    except Exception:  # the server's bytes, from which any error may come
        raise Refused("this site reads only arrays in NumPy's format") from None
    if not any(array.size for array in _updatable(arrays, policy).values()):
        raise Refused("this site's policy covers no floating-point array of this message")
    return arrays


def released(
    request: Arrays, answer: ArrayRecord | None, policy: MessagePolicy, noise: NoiseSource
) -> Arrays:
    """Return the arrays that leave: those of the request plus a bounded and noised update."""
    like = _updatable(request, policy)
    bounded = bounded_update(like, _read(answer, request), policy.clipping_norm)
    noised = noise.add_gaussian(bounded, policy.noise_multiplier * policy.clipping_norm)
    return {**request, **{name: _moved(array, noised[name]) for name, array in like.items()}}


def bounded_update(
    request: Arrays, answer: Mapping[str, np.ndarray], clipping_norm: float
) -> Arrays:
    """Return ``answer`` − ``request`` in float64 with a norm of at most ``clipping_norm``.

    The update is zero if an array is missing, or holds NaN or infinite values.
    """
    zeros = {name: np.zeros(array.shape) for name, array in request.items()}
    if not request.keys() <= answer.keys():
        return zeros
    with np.errstate(over="ignore", invalid="ignore"):
        update = {
            name: answer[name].astype(np.float64) - array.astype(np.float64)
            for name, array in request.items()
        }
    try:
        return dict(clip(update, clipping_norm).value)
    except NonFiniteUpdate:
        return zeros


def _updatable(request: Arrays, policy: MessagePolicy) -> Arrays:
    return {
        name: array
        for name, array in request.items()
        if array.dtype.kind == "f" and policy.covers(name)
    }


def _read(answer: ArrayRecord | None, request: Arrays) -> Arrays:
    """Return the arrays of an answer; empty if a name, shape or type differs from the request's."""
    if answer is None:
        return {}
    try:
        arrays = to_arrays(answer)
        check_like(arrays, request, types=True)
    except Exception:  # a hostile app's bytes, from which any error may come
        return {}
    return arrays


def _moved(array: np.ndarray, update: np.ndarray) -> np.ndarray:
    """Return an array plus an update, in the array's type and within its finite range."""
    largest = np.finfo(array.dtype).max
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.clip(array.astype(np.float64) + update, -float(largest), float(largest))
        return np.asarray(moved.astype(array.dtype))
