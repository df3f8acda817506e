"""Make a client's upload: run its method, protect the result, seal it, and store its memory.

There are two kinds of protection. For client- and user-level privacy, the client bounds its
*update* and adds noise to it. For record-level privacy, the client protects the records from which
it trained its whole *model*, by noise on the model, in each local step, or in the objective. The
mechanisms are in `privacy.mechanisms.protections`. A client whose training fails sends such an
upload, too (see `running`).
"""

from __future__ import annotations

from collections.abc import Mapping

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
from flower_ext.federation.client.running import check_finite, result_hiding_failures
from flower_ext.federation.failures import log_hidden
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.updates import NamedArrays, l2_norm
from flower_ext.training import Params, difference
from flower_ext.training.side_by_side import Steps


def upload_of(work: ClientWork) -> Steps[records.Update]:
    """Run the method, protect the update and store the memory, then return the client's reply."""
    result = yield from result_hiding_failures(work)
    contribution, update = _protected(work, result)
    metrics = _metrics(work, result, contribution)
    sent = work.request.seal(update, work.policy.context, work.method.name)
    # Store memory last, so that an error in masks or metrics keeps the previous round's memory.
    _store_memory(work, result, update)
    return records.Update(sent, metrics)


def _protected(work: ClientWork, result: LocalResult) -> tuple[Contribution, NamedArrays]:
    """Return the client's update before its protection, and the protected update."""
    received, protection = work.received, work.protection

    def protect(result: LocalResult) -> tuple[Contribution, NamedArrays]:
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
    """Return the part of a result that the plan bounds.

    If ``whole`` is True, this is the trained model. Otherwise it is the update. If the result has
    a model, its update is the model minus ``received``.

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
    update: Contribution, received: Params, protection: Protection, noise: NoiseSource
) -> NamedArrays:
    """Return the update as it leaves the client, apart from the masks of a masked sum.

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
    if isinstance(update, Mapping):
        released = protection.released(update, noise)
        if not protection.bounds_models:
            return released
        return {name: value - received[name] for name, value in released.items()}
    summed = protection.released_sum(update, noise)
    # Real numbers get the model's precision. Cells, encrypted bytes, and arrays that no model has,
    # such as the array `SIDE` of adaptive clipping, stay as they are.
    return {
        name: part.to(received[name].dtype)
        if name in received and (part := torch.as_tensor(value)).is_floating_point()
        else value
        for name, value in summed.items()
    }


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
        metrics["update-norm"] = l2_norm(_moved(work, contribution))
    return metrics


def _moved(work: ClientWork, contribution: Contribution) -> NamedArrays:
    """Return by how much a client would move the model, before clipping and noise."""
    if isinstance(contribution, Mapping):
        whole = work.protection.bounds_models
        return difference(contribution, work.received) if whole else contribution
    total = contribution.in_numbers()
    return {name: total[name] for name in work.received}


def _store_memory(work: ClientWork, result: LocalResult, update: NamedArrays) -> None:
    """Store the client's new memory, which may depend on the ``update`` that it sends."""
    memory, method = result.memory, work.method
    try:
        if callable(memory):
            received = work.received
            numbers = _in_numbers(update, work.protection.cell)
            released = {name: torch.as_tensor(numbers[name]) for name in received}
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


def _in_numbers(update: NamedArrays, cell: float | None) -> NamedArrays:
    """Return a protected update in real numbers, as the server reads it in the sum."""
    if cell is None:
        return update
    return {name: array * cell for name, array in records.arrays_of(update).items()}
