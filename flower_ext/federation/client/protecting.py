"""Make a client's upload: run its method, protect the result, seal it, and store its memory.

There are two kinds of protection. For client- and user-level privacy, the client bounds its
*update* and adds noise to it. For record-level privacy, the client protects the records from which
it trained its whole *model*, by noise on the model, in each local step, or in the objective. The
mechanisms are in `privacy.mechanisms.protections`.

Code that reads a client's data may fail because of the data: a training, the loss, the method,
`Task.data`. An error may therefore reveal a record. If noise protects the whole upload, a client
continues without the part that failed. It bounds the result, adds noise and sends it like every
other upload. The reason stays in the client's own log.

==============================  ==========================================================
what fails                      the client continues with
==============================  ==========================================================
`Task.data`                     no examples (`NO_DATA`)
one training                    the parameters with which this training began
the method                      the result of the method for no examples
the method, for no examples     the received model, and its memory as it was
==============================  ==========================================================

The last row does not hold for uploads that are sums over units: there, the client reports the error
(see `result_hiding_failures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flower_ext.errors import InvalidValue, is_tellable
from flower_ext.federation import records
from flower_ext.federation.client.client_method import (
    ClientWork,
    Contribution,
    LocalResult,
    Memory,
)
from flower_ext.federation.client.node import OF_UPLOADS
from flower_ext.federation.client.preparing import NO_DATA
from flower_ext.federation.failures import log_hidden
from flower_ext.federation.sums import masked
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection
from flower_ext.privacy.mechanisms.updates import l2_norm, require_finite
from flower_ext.training import Params, difference
from flower_ext.training.isolation import isolated
from flower_ext.training.side_by_side import Steps, Training, completed

Protected = Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]
"""A client's update as it leaves the client."""


def upload_of(work: ClientWork) -> Steps[records.Update]:
    """Run the method, protect the update and store the memory, then return the client's reply."""
    result = yield from result_hiding_failures(work)
    protection = work.protection
    contribution, update = _protected(work, result)
    metrics, sent = _metrics(work, result, contribution), records.arrays_of(update)
    if (cell := protection.cell) is not None:
        update = {name: value * cell for name, value in sent.items()}
        # The client's end of `MaskedSum`: from here the server sees the cohort's sum alone.
        of_sum = work.request.sums[records.SECURE_SUM]
        sent = masked.seal(sent, of_sum, work.policy.context, work.method.name)
    # Store memory last, so that an error in masks or metrics keeps the previous round's memory.
    _store_memory(work, result, update)
    return records.Update(sent, metrics)


def result_hiding_failures(work: ClientWork) -> Steps[LocalResult]:
    """Run the method, and hide its errors as far as the client's protection allows.

    If the protection neither hides failures nor bounds models, every error is raised. Otherwise the
    function hides errors, except in these cases:

    * A `tellable` error is raised, because it depends on no data.
    * If noise protects the local steps and not the whole upload, the function hides only errors in
      trainings without noise, such as the training of a personal model. Any other error is a fault
      of the method and is raised, because no record can make a step with noise fail.
    * If the upload must be a sum over units, an error that also occurs without examples is raised,
      because the received model cannot replace such a sum.
    """
    protection = work.protection
    if not (protection.hides_failures or protection.bounds_models):
        return (yield from completed(work.method.local_update(work)))
    try:
        return (yield from _finite_result(work))
    except Exception as error:
        if not protection.hides_failures or is_tellable(error):
            raise
        log_hidden(error)
    try:
        return (yield from _finite_result(replace(work, data=NO_DATA)))
    except Exception as error:
        if is_tellable(error) or protection.of_units:
            raise
        return LocalResult(model=work.received, memory=work.memory)


def _finite_result(work: ClientWork) -> Steps[LocalResult]:
    """Run the method, hide its failed trainings, and refuse a result that is not finite."""
    model: Any = None
    checked: Any = None
    with isolated():
        steps = completed(work.method.local_update(work))
    while True:
        try:
            with isolated():
                training = steps.send(model)
        except StopIteration as end:
            result: LocalResult = end.value
            break
        model = yield from _model_or_start(training)
        checked = model if training.without_noise else None
    for part in (result.model, result.update, result.memory):
        if isinstance(part, Mapping) and part is not checked:
            check_finite(part)
    return result


def _model_or_start(training: Training) -> Steps[Any]:
    """Return the trained model, or the initial parameters if a training without noise fails.

    After a training without noise, the returned parameters are finite.
    """
    try:
        model = yield training
        if training.without_noise:
            check_finite(model)
    except Exception as error:  # a record may have caused any error
        if not training.without_noise:
            raise
        log_hidden(error)
        model = dict(training.job.params)
        check_finite(model)
    return model


def _protected(work: ClientWork, result: LocalResult) -> tuple[Contribution, Protected]:
    """Return the client's update before its protection, and the protected update."""
    received, protection = work.received, work.protection

    def protect(result: LocalResult) -> tuple[Contribution, Protected]:
        contribution = contribution_of(result, received, whole=protection.bounds_models)
        noise = work.policy.noise(work.request.entries, OF_UPLOADS)
        return contribution, protected(contribution, received, protection, noise)

    try:
        return protect(result)
    except Exception as error:  # a difference of two finite models may overflow
        if is_tellable(error) or not (protection.hides_failures and not protection.of_units):
            raise
        log_hidden(error)
        return protect(LocalResult(model=received))


def contribution_of(result: LocalResult, received: Params, *, whole: bool) -> Contribution:
    """Return the update in a result, or the model if the plan bounds the ``whole`` model.

    Raises
    ------
    InvalidValue
        The result has both a model and an update, or neither. Or the plan bounds the model, and the
        result has only an update.
    """
    if (result.model is None) == (result.update is None):
        raise InvalidValue.tellable("LocalResult: expected either a model or an update")
    if result.model is not None:
        return result.model if whole else difference(result.model, received)
    if whole or result.update is None:
        raise InvalidValue.tellable(
            "the plan clips whole models and adds noise to them, but the method returns an "
            "update: return LocalResult(model=...)"
        )
    return result.update


def protected(
    update: Contribution,
    received: Params,
    protection: Protection,
    noise: NoiseSource,
) -> Protected:
    """Return the update as it leaves the client.

    If the protection `bounds_models`, ``update`` is the whole trained model. A model that is
    rebuilt from the received model and a difference would have rounding errors, which the
    sensitivity bound does not cover.

    Raises
    ------
    InvalidValue
        The method bounds what each unit adds to the update, but the plan does not expect that; or
        the plan expects it, but the method does not. Or the method's bound is larger than the
        plan's.
    """
    # A sum over units states how far one unit moves it. Clipping the whole sum would not bound this
    # distance.
    if isinstance(update, BoundedSum | HiddenSum) or protection.of_units:
        return _noised_sum(update, received, protection, noise)
    released = protection.released(update, noise)
    if not protection.bounds_models:
        return released
    return {name: value - received[name] for name, value in released.items()}


def _noised_sum(
    update: Contribution,
    received: Params,
    protection: Protection,
    noise: NoiseSource,
) -> Protected:
    """Add this client's share of the noise to a sum to which the method bounds each unit's part."""
    if (
        not isinstance(update, BoundedSum | HiddenSum)
        or not (isinstance(protection, ClipAndNoise) and protection.of_units)
        or not update.bound <= protection.clipping_norm  # also if it is NaN
        or getattr(update, "cell", None) != protection.cell
    ):
        raise InvalidValue.tellable(
            f"the method sets {_bound_of(update)} for each unit's part of the update: the plan "
            f"expects {_bound_of(protection)}"
        )
    if isinstance(update, HiddenSum):  # `encrypt` adds the noise before it encrypts
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in received.items()}
        return update.encrypt(noise.gaussian(zeros, protection.noise_stddev))
    noised = protection.noised(update.value, noise)
    if protection.cell is not None:
        return noised
    sent = {name: torch.as_tensor(value) for name, value in noised.items()}
    # A sum may have an array that no model has, such as the array `SIDE` of adaptive clipping.
    return {n: v.to(received[n].dtype) if n in received else v for n, v in sent.items()}


def _bound_of(value: object) -> str:
    """Return the words in which an error states the bound on each unit's part of a sum.

    ``value`` is the sum, or the protection that the plan requires.
    """
    if isinstance(value, BoundedSum | HiddenSum):
        bound = f"a bound of {value.bound:g}"
    elif isinstance(value, ClipAndNoise) and value.of_units:
        bound = f"a bound of {value.clipping_norm:g}"
    else:
        return "no bound"
    cell = getattr(value, "cell", None)
    return bound if cell is None else f"{bound} in cells of {cell:g}"


def _metrics(work: ClientWork, result: LocalResult, contribution: Contribution) -> dict[str, float]:
    """Return the numbers that leave the client in addition to its update."""
    entries, protection = work.request.entries, work.protection
    metrics: dict[str, float] = {}
    if entries.get("report-size"):
        # A client that could not load its data reports the agreed number.
        agreed = protection.num_examples
        size = len(work.data.train) if agreed is None else agreed
        metrics |= {"num-examples": size, **result.metrics}
    if entries.get("diagnostics"):
        if isinstance(contribution, HiddenSum):
            raise InvalidValue.tellable(
                "diagnostics=True: expected False, because the client encrypts its sum"
            )
        moved: Mapping[str, Any]
        if isinstance(contribution, BoundedSum):
            total = contribution.in_numbers()
            moved = {name: total[name] for name in work.received}
        elif protection.bounds_models:
            moved = difference(contribution, work.received)
        else:
            moved = contribution
        metrics["update-norm"] = l2_norm(moved)
    return metrics


def _store_memory(work: ClientWork, result: LocalResult, update: Protected) -> None:
    """Store the client's new memory, which may depend on the ``update`` that it sends."""
    memory, method = result.memory, work.method
    try:
        if callable(memory):
            received = work.received
            released = {name: torch.as_tensor(update[name]) for name in received}
            memory = memory({n: v.to(received[n].dtype) for n, v in released.items()})
        check_finite(memory)
    except Exception as error:  # a missing upload would reveal the error
        if not work.protection.hides_failures:
            raise
        log_hidden(error)
        memory = work.memory
    if memory is None:
        return
    if work.store is None:
        reason = f"{method.name} returns memory, but declares memory=Memory.NONE"
        raise InvalidValue.tellable(f"{reason}: declare another Memory")
    mirrored = method.memory is Memory.MIRRORED
    work.store.store(memory, work.round, and_before=mirrored)


def check_finite(params: Params | None) -> None:
    """Refuse parameters that are not finite; None stands for no parameters.

    Raises
    ------
    NonFiniteUpdate
        A parameter is NaN or infinite; the message names the first one.
    """
    require_finite(params or {}, "after training", "the client stores and sends nothing")
