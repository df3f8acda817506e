"""Trainings that fail leave their model as it was: an error instead would tell of a record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from logging import getLogger
from typing import Any

import torch

from flower_ext.errors import is_tellable
from flower_ext.federation.client.method import ClientWork, LocalResult
from flower_ext.privacy import NonFiniteUpdate
from flower_ext.privacy.protections import ClipSteps, Protection
from flower_ext.training import Params
from flower_ext.training.side_by_side import Steps

log = getLogger("flwr")


def check_finite(params: Params | None) -> None:
    """Refuse parameters that are not finite; None stands for no parameters.

    Raises
    ------
    NonFiniteUpdate
        Names the first that is not.
    """
    for name, value in (params or {}).items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise NonFiniteUpdate(f"{name!r} is not finite after training: nothing is kept or sent")


def unmoved_by_errors(
    local_update: Callable[[ClientWork], LocalResult | Steps[LocalResult]],
    work: ClientWork,
    protection: Protection | None = None,
) -> Steps[LocalResult]:
    """Let a training that raises or diverges leave its model as it was; all else too, if need be.

    For models that leave the client under noise: an error in place of one would tell of a record.
    Where each step is noised instead, no record makes these steps fail; what else does is an error.
    So is what the server's message lacks (see `tellable`).
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
            except Exception as error:  # whatever a model or a loss makes of a record
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
    """Tell the client's operator that a training failed; the server gets a model as usual."""
    if isinstance(error, NonFiniteUpdate):
        log.warning(
            "a local training diverges (its model is not finite), and its model stays as it was: "
            "take a smaller learning rate if many do, or look into this client's data"
        )
    else:
        log.warning(
            "a local training fails (%s), and its model stays as it was: look into this client's "
            "data, or into the task if no client trains",
            type(error).__name__,
        )
    log.debug("a local training fails", exc_info=error)
