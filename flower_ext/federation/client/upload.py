"""Make a client's upload: run the method, protect and mask its result, and store its memory.

There are two kinds of protection. For client- and user-level privacy, the client bounds its
*update* and adds noise to it. For record-level privacy, the client protects its whole trained
*model*: it adds noise to the model, to each local step, or to the objective. The mechanisms are in
`privacy.mechanisms.protections`.

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
(see `result_hiding_failures`). The method's metrics are the same in all rows: they depend only on
the settings of the training and the number of examples that the client reports.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation.client.assignment import NO_DATA, Assignment
from flower_ext.federation.client.client_method import ClientWork, Contribution, LocalResult, Memory
from flower_ext.federation.client.hidden_errors import hide_errors, log_hidden
from flower_ext.federation.client.node import OF_UPLOADS
from flower_ext.federation.messages import records
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.updates import NamedArrays, l2_norm, require_finite
from flower_ext.training import Params, difference
from flower_ext.training.isolation import isolated
from flower_ext.training.side_by_side import Steps, Training, completed

NUM_EXAMPLES, UPDATE_NORM = "num-examples", "update-norm"
"""Names of the metrics that the client side sends, whatever the method."""


def upload_of(assignment: Assignment) -> Steps[Update]:
    """Run the method, protect the update and store the memory, then return the client's reply."""
    result = yield from result_hiding_failures(assignment.work)
    contribution, update = _protected(assignment, result)
    metrics = _metrics(assignment, contribution)
    sent = assignment.sum.seal(update, assignment.work.protection)
    # Store memory last, so that an error in masks or metrics keeps the previous round's memory.
    _store_memory(assignment, result, update)
    return Update(sent, metrics)


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
    with hide_errors(protection.hides_failures):
        return (yield from _finite_result(work))
    # The error was hidden.
    with hide_errors(not protection.of_units):
        return (yield from _finite_result(replace(work, data=NO_DATA)))
    return LocalResult(model=work.received, memory=work.memory)  # both errors were hidden


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


def _protected(assignment: Assignment, result: LocalResult) -> tuple[Contribution, NamedArrays]:
    """Return the client's update before its protection, and the protected update."""
    received, protection = assignment.work.received, assignment.work.protection

    def protect(result: LocalResult) -> tuple[Contribution, NamedArrays]:
        contribution = contribution_of(result, received, whole=protection.bounds_models)
        noise = assignment.policy.noise(assignment.request.round, OF_UPLOADS)
        return contribution, protected(contribution, received, protection, noise)

    # A difference of two finite models may overflow.
    with hide_errors(protection.hides_failures and not protection.of_units):
        return protect(result)
    return protect(LocalResult(model=received))  # the error was hidden


def contribution_of(result: LocalResult, received: Params, *, whole: bool) -> Contribution:
    """Return the part of a result that the plan bounds: the ``whole`` trained model, or the update.

    The update of a trained model is the model minus ``received``.
    """
    if (result.model is None) == (result.update is None):
        raise InvalidValue.tellable(
            "LocalResult has both a model and an update, or neither: expected exactly one of them"
        )
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


def _metrics(assignment: Assignment, contribution: Contribution) -> dict[str, float]:
    """Return the numbers that leave the client in addition to its update."""
    work, of_round = assignment.work, assignment.request.round
    received, protection = work.received, work.protection
    metrics: dict[str, float] = {}
    if of_round.report_size:
        metrics = {**_metrics_of_method(work), NUM_EXAMPLES: work.num_examples}
    if of_round.diagnostics:
        # The distance by which the client would move the model, before clipping and noise.
        if isinstance(contribution, Mapping):
            whole = protection.bounds_models
            moved = difference(contribution, received) if whole else contribution
        else:
            total = contribution.in_numbers()
            moved = {name: total[name] for name in received}
        metrics[UPDATE_NORM] = l2_norm(moved)
    return metrics


def _metrics_of_method(work: ClientWork) -> Mapping[str, float]:
    """Return the method's metrics; refuse names that have a meaning in every reply."""
    if work.method.metrics is None:
        return {}
    with knowing_no_data():
        metrics = work.method.metrics(work.training, work.num_examples)
        if reserved := metrics.keys() & {NUM_EXAMPLES, UPDATE_NORM}:
            raise InvalidValue(
                f"metrics of {work.method.name} are named {sorted(reserved)}: expected other "
                "names, because every client's reply uses these"
            )
        return metrics


def _store_memory(assignment: Assignment, result: LocalResult, update: NamedArrays) -> None:
    """Store the client's new memory; if it is a function, call it with the sent ``update``."""
    work, store = assignment.work, assignment.store
    memory, method, cell = result.memory, work.method, work.protection.cell
    try:
        if callable(memory):
            if cell is not None:  # in real numbers, as the server reads the update in the sum
                update = {name: array * cell for name, array in records.arrays_of(update).items()}
            released = {n: torch.as_tensor(update[n]).to(p.dtype) for n, p in work.received.items()}
            memory = memory(released)
        check_finite(memory)
    except Exception as error:  # a missing upload would reveal the error
        if not work.protection.hides_failures:
            raise
        log_hidden(error)
        memory = work.memory
    if memory is None and method.memory is Memory.MIRRORED:
        # The server may name this round as the last one that the client remembers.
        memory = work.memory or {}
    if memory is None:
        return
    if store is None:
        reason = f"{method.name} returns memory, but declares memory=Memory.NONE"
        raise InvalidValue.tellable(f"{reason}: declare a different Memory")
    store.store(memory, work.round, and_before=method.memory is Memory.MIRRORED)


def check_finite(params: Params | None) -> None:
    """Raise `NonFiniteUpdate` if a parameter is NaN or infinite; None stands for no parameters."""
    require_finite(params or {}, "after training", "the client stores and sends nothing")
