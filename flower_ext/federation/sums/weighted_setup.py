"""A silo's set-up of a weighted sum: its answers to the steps before the rounds.

`weighted` has the server's end and a table of all messages. A silo's state is in the client's
vault. Each message may reach a new process, which loads the state, takes one step and stores the
new state before it sends anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord

from flower_ext.data import ClientData
from flower_ext.data.examples import owned
from flower_ext.errors import ProtocolError, knowing_no_data, tellable
from flower_ext.federation.records import Arrays, bytes_record, single_message
from flower_ext.federation.state.memory import ClientVault
from flower_ext.secure.weighting.agreement import BEGIN, COUNT, DRAW, KEYS
from flower_ext.secure.weighting.protocol import protocol_of

if TYPE_CHECKING:  # it needs the extra ``weighting``, and is imported by its protocol's name
    from flower_ext.secure.weighting.silo_party import SiloParty

log = getLogger("flwr")


def answer(
    message: Arrays, data: ClientData, partition: int, vault: ClientVault, *, may_simulate: bool
) -> ArrayRecord:
    """Answer one step of the set-up of a weighted sum, or of a secret draw.

    Parameters
    ----------
    message : Mapping[str, ndarray]
        The arrays of the server's message that concern the weighted sum.
    data, partition
        The data and the number of this silo.
    vault : ClientVault
    may_simulate : bool
        True if this client accepts settings that protect nobody (see `NodePolicy`).

    Raises
    ------
    ProtocolError
        The step is out of order or repeated.
    InvalidValue
        The server's message is malformed, or the data do not name the owner of each record.
    """
    with protocol_errors():
        step, content = single_message(message, BEGIN, KEYS, COUNT, DRAW)
        is_first = step == BEGIN
        silo = _begin(content, partition, vault, may_simulate) if is_first else stored_silo(vault)
        if silo is None:
            raise ProtocolError(
                f"silo {partition} has no keys of this run: name a state-folder in its "
                "node config, so that keys outlive the SuperNode, and start the run anew"
            )
        settings, counts = silo.settings, list[int]()
        if step == COUNT:
            counts = counts_of(data, settings.users, settings.record_limit(silo.index))
        return bytes_record(step, silo.answer(step, content, counts))


def _begin(content: bytes, partition: int, vault: ClientVault, may_simulate: bool) -> SiloParty:
    """Return a silo with fresh keys, for the protocol and the settings in the server's message.

    Refuse a run for which this silo has keys, and insecure settings outside simulation.
    """
    before = stored_silo(vault)
    with knowing_no_data():
        kind = protocol_of(content).silo_type
        settings = kind.settings_type.from_bytes(content)
        if before is not None and before.settings.run == settings.run:
            raise ProtocolError(
                "the server begins a set-up, but this silo already has keys of this run: start a "
                "new run"
            )
        if settings.insecurity and not may_simulate:
            raise PermissionError(
                f"the server asks for {settings.insecurity}: this client accepts them only in "
                "simulation, with client_app(..., allow_seeded_noise=True)"
            )
        silo = kind(settings, partition)
        silo.save = vault.store
        return silo


def counts_of(data: ClientData, users: int, most: int) -> list[int]:
    """Return the number of records that each user has in this silo, but at most ``most``.

    A user with more records is counted as one with ``most`` records. An error instead would tell
    everybody that this silo has such a user. The weights of each user still sum to one.

    Raises
    ------
    ValueError
        The data do not name the owner of each record, or an owner is out of range.
    """
    counts = torch.bincount(owned(data, users).owners.cpu().long(), minlength=users)
    if above := int((counts > most).sum()):
        log.warning(
            "%d users have more records in this silo than the %d that the settings allow, so they "
            "get the weight of a user with %d records; to change this, agree with the other silos "
            "on a larger limit",
            above,
            most,
            most,
        )
    return [int(count) for count in counts.clamp(max=most)]


def stored_silo(vault: ClientVault) -> SiloParty | None:
    """Return the silo that the vault holds, whatever its protocol; None if the vault is empty."""
    if (stored := vault.load()) is None:
        return None
    silo = protocol_of(stored).silo_type.from_bytes(stored)
    silo.save = vault.store
    return silo


@contextmanager
def protocol_errors() -> Iterator[None]:
    """Let the server see a `ProtocolError`, which depends only on steps, rounds and silos."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None
