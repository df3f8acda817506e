"""Load and check the data of a client, before its method sees them."""

from __future__ import annotations

import torch

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.errors import is_tellable, tellable
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.failures import log_hidden, log_once
from flower_ext.federation.protection import Unprotected
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.training import Task
from flower_ext.training.between_trainings import refuse_state_between_trainings
from flower_ext.training.isolation import isolated

_NONE = Examples(features=torch.empty(0), targets=torch.empty(0))
NO_DATA = SiloData(train=_NONE, test=_NONE, owners=torch.empty(0, dtype=torch.int64))
"""Data of a client without examples, which every method accepts."""


def checked_data(task: Task, request: ClientRequest, partition: int) -> ClientData:
    """Return a client's checked data, or no examples if an error in them must stay hidden.

    Raises
    ------
    PreconditionFailed
        The server's plan assumes another number of examples.
    Exception
        As `data_of`, and as `refuse_state_between_trainings`.
    """
    hide_errors = request.hides_missing_data
    data = data_of(task, partition, hide_errors=hide_errors)
    if isinstance(data, SiloData) and data is not NO_DATA:
        data = data.without(request.entries.get("withdrawn", ()))
    if data is NO_DATA or isinstance(request.protection, Unprotected):
        return data
    num_examples = len(data.train)
    _check_size(num_examples, request.protection)
    if request.kind != "train" or num_examples == 0:
        return data
    try:  # the model may fail on examples of this kind
        refuse_state_between_trainings(task, data.train)
    except Exception as error:
        if is_tellable(error) or not hide_errors:
            raise
        log_hidden(error)
        return NO_DATA
    return data


def data_of(task: Task, partition: int, *, hide_errors: bool) -> ClientData:
    """Return a client's data; no examples if they cannot be loaded and ``hide_errors`` is True.

    Raises
    ------
    TypeError
        The task returned something else than ClientData.
    Exception
        Any error of ``Task.data``. If ``hide_errors`` is True, only a `tellable` one is raised; all
        others are written to the client's log.
    """
    try:
        with isolated():
            data = task.data(partition)
        if isinstance(data, ClientData):
            return data
        error: Exception = TypeError("data(partition) of the Task: expected ClientData")
        if not hide_errors:
            raise tellable(error)
    except Exception as raised:
        if not hide_errors or is_tellable(raised):
            raise
        error = raised
    log_once(
        "the data of this client could not be loaded (%s), so it counts as a client without "
        "examples: check Task.data",
        error,
    )
    return NO_DATA


def _check_size(num_examples: int, protection: Protection) -> None:
    """Refuse to train on a different number of examples than the guarantee assumes."""
    agreed = protection.num_examples
    if agreed is not None and num_examples != agreed:
        raise tellable(
            PreconditionFailed(
                f"this client does not train on the plan's num_examples={agreed}, which holds for "
                "all clients: give every client that many, or change the plan"
            )
        )
