"""Replace a failed training's result by the received model, because an error reveals a record.

Any error in code that reads a client's data may be due to the data: a training, the loss, the
method, `Task.data`. Where noise protects the whole upload, such a client counts as one without
examples. Its upload is the received model, bounded and noised like every upload, and the reason
stays in the client's own log.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from logging import getLogger
from typing import Any

import torch

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.errors import is_tellable, tellable
from flower_ext.federation.client.client_method import ClientWork, LocalResult
from flower_ext.federation.failures import raised_at
from flower_ext.privacy import NonFiniteUpdate
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.training import Params, Task
from flower_ext.training.isolation import isolated
from flower_ext.training.params import is_finite
from flower_ext.training.side_by_side import Steps

log = getLogger("flwr")

_NONE = Examples(features=torch.empty(0), targets=torch.empty(0))
NO_DATA = SiloData(train=_NONE, test=_NONE, owners=torch.empty(0, dtype=torch.int64))
"""Data of a client without examples, which every method accepts."""
_shown: set[tuple[str, int]] = set()
"""Lines of code whose tracebacks this process has logged already."""


def data_of(task: Task, partition: int, *, hidden: bool) -> ClientData:
    """Return a client's data, or no examples if ``hidden`` is True and the data cannot be loaded.

    Raises
    ------
    TypeError
        The task returned something else than ClientData.
    Exception
        Any error of ``Task.data``. If ``hidden`` is True, an error that is not `tellable` is not
        raised but written to the client's log.
    """
    try:
        with isolated():
            data = task.data(partition)
        if isinstance(data, ClientData):
            return data
        error: Exception = TypeError("data(partition) of the Task: expected ClientData")
        if not hidden:
            raise tellable(error)
    except Exception as raised:
        if not hidden or is_tellable(raised):
            raise
        error = raised
    _log_with_traceback(
        "the data of this client could not be loaded (%s), so it counts as a client without "
        "examples: check Task.data",
        error,
    )
    return NO_DATA


def check_finite(params: Params | None) -> None:
    """Refuse parameters that are not finite; None stands for no parameters.

    Raises
    ------
    NonFiniteUpdate
        A parameter is NaN or infinite; the message names the first one.
    """
    for name, value in (params or {}).items():
        if not is_finite(value):
            raise NonFiniteUpdate(
                f"{name!r} is not finite after training: the client stores and sends nothing"
            )


def unmoved_by_errors(
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]],
    work: ClientWork,
    protection: Protection,
) -> Steps[LocalResult]:
    """Run ``local_update``, but leave the model unchanged if its training raises or diverges.

    If a single training fails, its own model stays as it was. If the method fails, it is called
    again for a client without examples. If that fails too, the client sends the received model and
    keeps its memory. Under a protection that takes no models, the error is raised instead.

    A `tellable` error depends on no data and is raised. If the protection does not hide failures,
    because noise protects each step, only trainings without noise, such as that of a personal
    model, may fail unseen. No record can make a noised step fail, so any other error is a fault of
    the method and is raised.
    """
    try:
        return (yield from _unmoved_trainings(local_update, work))
    except Exception as error:
        if not protection.hides_failures or is_tellable(error):
            raise
        log_unmoved(error)
    try:
        return (yield from _unmoved_trainings(local_update, replace(work, data=NO_DATA)))
    except Exception as error:
        if is_tellable(error) or not protection.takes_models:
            raise
        return LocalResult(model=work.received, memory=work.memory)


def _unmoved_trainings(
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]], work: ClientWork
) -> Steps[LocalResult]:
    """Run ``local_update``; a failed training without noise leaves its model unchanged."""
    trained: Any = None
    checked: Any = None
    with isolated():
        run = local_update(work)
    while isinstance(run, Generator):
        try:
            with isolated():
                wanted = run.send(trained)
        except StopIteration as end:
            run = end.value
            break
        try:
            trained = yield wanted
            if wanted.without_noise:
                check_finite(trained)
                checked = trained
        except Exception as error:  # a record may have caused any error
            if not wanted.without_noise:
                raise
            log_unmoved(error)
            trained = dict(wanted.job.params)
    result: LocalResult = run
    for part in (result.model, result.update, result.memory):
        if isinstance(part, Mapping) and part is not checked:
            check_finite(part)
    return result


def log_unmoved(error: Exception) -> None:
    """Log a failed training for the client's operator; the server receives a model as usual."""
    if isinstance(error, NonFiniteUpdate):
        log.warning(
            "a local training diverged (its model is not finite), so its model stays unchanged: "
            "take a smaller learning rate if many trainings diverge, or check this client's data"
        )
    else:
        _log_with_traceback(
            "a local training failed (%s), so its model stays unchanged: check this client's data, "
            "or the task if no client trains",
            error,
        )


def _log_with_traceback(text: str, error: Exception) -> None:
    """Log a text about the type of an error, with one traceback for each line of code."""
    where = raised_at(error)
    log.warning(text, type(error).__name__, exc_info=None if where in _shown else error)
    _shown.add(where)
