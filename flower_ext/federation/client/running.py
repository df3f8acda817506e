"""Run a client's method, and hide its failures behind an upload like any other.

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

from flower_ext.errors import is_tellable
from flower_ext.federation.client.client_method import ClientWork, LocalResult
from flower_ext.federation.client.preparing import NO_DATA
from flower_ext.federation.failures import log_hidden
from flower_ext.privacy.mechanisms.updates import require_finite
from flower_ext.training import Params
from flower_ext.training.isolation import isolated
from flower_ext.training.side_by_side import Steps, Training, completed


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


def check_finite(params: Params | None) -> None:
    """Refuse parameters that are not finite; None stands for no parameters.

    Raises
    ------
    NonFiniteUpdate
        A parameter is NaN or infinite; the message names the first one.
    """
    require_finite(params or {}, "after training", "the client stores and sends nothing")
