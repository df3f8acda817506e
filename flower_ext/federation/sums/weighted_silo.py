"""A silo's end of a weighted sum: its steps in the set-up, and what it adds to the sum of a round.

`weighted` has the server's end and a table of all messages. A silo's state is in the client's
vault. Each message may reach a new process, which loads the state, takes one step and stores the
new state before it sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
import torch
from flwr.app import ArrayRecord

from flower_ext.data import ClientData
from flower_ext.data.examples import owned
from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data, tellable
from flower_ext.federation import records
from flower_ext.federation.records import Arrays, arrays_of, bytes_record, flattened, single_message
from flower_ext.federation.state.memory import ClientVault
from flower_ext.federation.sums.weighted import LOST, SUM, WEIGHTS
from flower_ext.privacy.mechanisms.bounds import ArraysMap, clip_each_row
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.secure.weighting.agreement import BEGIN, COUNT, DRAW, KEYS
from flower_ext.secure.weighting.protocol import protocol_of
from flower_ext.training import Params
from flower_ext.training.params import flat_rows

if TYPE_CHECKING:  # they need the extra ``weighting``, and are imported by their protocol's name
    from flower_ext.secure.weighting.silo_party import SiloParty

log = getLogger("flwr")


@dataclass(frozen=True, kw_only=True)
class HiddenSum:
    """A sum over units that leaves the client only in encrypted form.

    Parameters
    ----------
    bound : float
        Largest L2 distance by which one unit can move the sum, as in `BoundedSum`.
    like : Params
        Names and shapes of the sum.
    encrypt : Callable[[Params], Mapping[str, np.ndarray]]
        Function that takes this client's share of the noise, in float64, and returns the encrypted
        upload: the sum plus noise, in integer multiples of a public step. Do not round the noise
        before: the function itself rounds it to multiples of the step, and the noise on a coarser
        grid would not hide the multiples between.
    """

    bound: float
    like: Params
    encrypt: Callable[[Params], Mapping[str, np.ndarray]]
    cell: ClassVar[None] = None

    def noised(self, add_noise: ArraysMap, draw_noise: ArraysMap) -> NamedArrays:
        """Return the encrypted sum of the units and one client's share of the noise."""
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self.like.items()}
        return self.encrypt(dict(draw_noise(zeros)))

    def in_numbers(self) -> NoReturn:
        """Refuse to return the sum, because it leaves the client only in encrypted form."""
        raise InvalidValue.tellable(
            "diagnostics=True: expected False, because the client encrypts its sum"
        )


def answer(
    message: Arrays, data: ClientData, partition: int, vault: ClientVault, *, may_simulate: bool
) -> ArrayRecord:
    """Answer one step of the set-up of a weighted sum, or of a secret draw.

    Parameters
    ----------
    message : Mapping[str, ndarray]
        The record of the weighted sum in the server's message.
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
    with _protocol_errors():
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
    """Return a silo with fresh keys, for the protocol and the settings that the server sent."""
    before = stored_silo(vault)
    with knowing_no_data():
        kind = protocol_of(content).silo_type
        settings = kind.settings_type.from_bytes(content)
        if before is not None and before.settings.run == settings.run:
            raise ProtocolError(
                "the server begins the set-up of a run for which this silo has keys: expected a "
                "new run"
            )
        if settings.insecurity and not may_simulate:
            raise PermissionError(
                f"the server asks for {settings.insecurity}: this client takes part only in "
                "simulation (client_app(..., allow_seeded_noise=True))"
            )
        silo = kind(settings, partition)
        silo.save = vault.store
        return silo


def counts_of(data: ClientData, users: int, most: int) -> list[int]:
    """Return each user's number of records in this silo, or ``most`` if the user has more.

    A refusal would tell everybody that this silo has a user with more records. The weights of each
    user still sum to one.

    Raises
    ------
    ValueError
        The data do not name the owner of each record, or an owner is out of range.
    """
    counts = torch.bincount(owned(data, users).owners.cpu().long(), minlength=users)
    if above := int((counts > most).sum()):
        log.warning(
            "%d users have more records in this silo than the %d that the settings allow, and get "
            "the weight of a user with %d records: agree with the other silos on larger limits",
            above,
            most,
            most,
        )
    return [int(count) for count in counts.clamp(max=most)]


def stored_silo(vault: ClientVault) -> SiloParty | None:
    """Return the silo that was stored last, whatever its protocol; None if none was stored."""
    if (stored := vault.load()) is None:
        return None
    silo = protocol_of(stored).silo_type.from_bytes(stored)
    silo.save = vault.store
    return silo


@contextmanager
def _protocol_errors() -> Iterator[None]:
    """Let the server see a `ProtocolError`, which depends only on steps, rounds and silos."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None


def open_part(
    message: Arrays | None,
    vault: ClientVault,
    number: int,
    users: int,
    clipping_norm: float,
    like: Params,
) -> SiloPart | LostPart | None:
    """Begin this silo's contribution to the weighted sum of round ``number``.

    ``message`` is the record of the weighted sum in the server's request. If it is None, the method
    weights the users itself, and the function returns None. ``users`` is the number of users, and
    ``like`` has the names and shapes of an update.

    Raises
    ------
    ProtocolError
        The silo has contributed to the round before, or ``users`` differs from the set-up.
    """
    if message is None:
        return None
    if (silo := stored_silo(vault)) is None:
        return LostPart(clipping_norm, like)
    with _protocol_errors():
        _, weights = single_message(message, WEIGHTS)
        if users != silo.settings.users:
            raise ProtocolError(
                f"the server asks for a round with {users} users: expected {silo.settings.users}, "
                "as in the set-up"
            )
        return SiloPart(silo, number, weights, clipping_norm, like)


class LostPart:
    """The contribution of a silo that has lost its keys: a notice to the server, and no sum."""

    def __init__(self, clipping_norm: float, like: Params) -> None:
        lost = {LOST: np.zeros(1, dtype=np.uint8)}
        self.value = HiddenSum(bound=clipping_norm, like=like, encrypt=lambda noise: lost)

    def counts(self, user: int) -> bool:
        """Return False, because a silo without keys adds no user's update."""
        return False

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Add nothing."""


class SiloPart:
    """A silo's contribution to a round: one clipped update of each user whom the set-up counted.

    A silo that lost its data, or whose users came or left after the set-up, still sends a sum. In
    it, the update of a user without records is zero. A silo that cannot encrypt an update, because
    a record is unusual, sends a sum of zeros: a missing sum would reveal the record.

    Parameters
    ----------
    silo : SiloParty
    number : int
        Number of the round.
    weights : bytes
        The server's message of the round.
    clipping_norm : float
    like : Params
        Names and shapes of an update.
    """

    def __init__(
        self, silo: SiloParty, number: int, weights: bytes, clipping_norm: float, like: Params
    ) -> None:
        self._begin = partial(silo.open_sum, number, weights)
        self._norm, self._like, self._counted = clipping_norm, like, frozenset(silo.counted)
        self._sum = self._begin()
        self._error: Exception | None = None

    @property
    def value(self) -> HiddenSum:
        """The sum, to which `seal` adds noise and masks before it leaves the silo."""
        return HiddenSum(bound=self._norm, like=self._like, encrypt=self.seal)

    def counts(self, user: int) -> bool:
        """Return True if the set-up counted the user; the weight of any other user is zero."""
        return user in self._counted

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Clip one row of ``rows`` for each of ``users``, and add the rows to the sum.

        The function keeps an error for `seal`, because several silos may train in one batch, and an
        error of one silo must not end the work of the others.
        """
        clipped = clip_each_row(rows, self._norm)
        vectors = torch.cat([flat_rows(clipped[name]) for name in sorted(clipped)], dim=1)
        try:
            if self._error is None:
                self._sum.add(dict(zip(users, vectors.cpu().numpy(), strict=True)))
        except Exception as error:
            self._error = error

    def seal(self, noise: Params) -> Arrays:
        """Return the masked sum with this silo's noise, or a sum of zeros if encryption fails.

        Raises
        ------
        ProtocolError
            The silo has contributed to the round before.
        Exception
            A sum of zeros cannot be encrypted either, so the updates are not the cause.
        """
        vector = flattened(arrays_of(noise))
        with _protocol_errors():
            try:
                if self._error is not None:
                    raise self._error
                masked = self._sum.finish(vector)
            except ProtocolError:
                raise
            except Exception as error:
                log.warning(
                    "the updates of this silo cannot be encrypted (%s), so this silo adds zeros to "
                    "the sum: check this silo's data and memory",
                    type(error).__name__,
                    exc_info=error,
                )
                # A fresh sum replaces the first one, which never leaves the silo.
                masked = self._begin().finish(vector)
        return {SUM: records.to_bytes_array(masked)}
