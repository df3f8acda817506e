"""Replace a failed training's result by the received model, because an error reveals a record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from logging import getLogger
from typing import Any

from flower_ext.errors import is_tellable
from flower_ext.federation.client.method import ClientWork, LocalResult
from flower_ext.privacy import NonFiniteUpdate
from flower_ext.privacy.protections import ClipSteps, Protection
from flower_ext.training import Params
from flower_ext.training.params import is_finite
from flower_ext.training.side_by_side import Steps

log = getLogger("flwr")


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
    protection: Protection | None = None,
) -> Steps[LocalResult]:
    """Run ``local_update``, but leave the model unchanged if its training raises or diverges.

    Use it if noise protects the uploaded model: an error in place of a model would reveal something
    about a record. If the whole update fails, the received model is the result.

    Two kinds of errors are raised. Under `ClipSteps`, noise protects each step and no record can
    make a step fail, so any other error is a fault of the method. A `tellable` error depends on no
    data.
    """
    steps_noised = isinstance(protection, ClipSteps)
    trained: Any = None
    try:
        run = local_update(work)
        while isinstance(run, Generator):
            try:
                wanted = run.send(trained)
            except StopIteration as end:
                run = end.value
                break
            try:
                trained = yield wanted
                if wanted.without_noise:
                    check_finite(trained)
            except Exception as error:  # a record may have caused any error
                if not wanted.without_noise:
                    raise
                log_unmoved(error)
                trained = dict(wanted.job.params)
        result: LocalResult = run
        for part in (result.model, result.update, result.memory):
            if isinstance(part, Mapping):
                check_finite(part)
    except Exception as error:
        if steps_noised or is_tellable(error):
            raise
        log_unmoved(error)
        return LocalResult(model=work.received)
    return result


def log_unmoved(error: Exception) -> None:
    """Log a failed training for the client's operator; the server receives a model as usual."""
    if isinstance(error, NonFiniteUpdate):
        log.warning(
            "a local training diverged (its model is not finite), so its model stays unchanged: "
            "take a smaller learning rate if many trainings diverge, or check this client's data"
        )
    else:
        log.warning(
            "a local training failed (%s), so its model stays unchanged: check this client's data, "
            "or the task if no client trains",
            type(error).__name__,
        )
    log.debug("a local training failed", exc_info=error)
