"""A silo's end of a weighted sum: its answers to the steps of the set-up, and its contributions.

`weighted` has the server's end and a table of all messages. A silo's state is in the client's
vault. Each message may reach a new process, which loads the state, takes one step and stores the
new state before it sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
import torch

from flower_ext.data import ClientData
from flower_ext.data.users import owned
from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data, tellable
from flower_ext.federation.messages.addresses import partition_of
from flower_ext.federation.messages.records import arrays_of, flattened, to_bytes_array
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.federation.sums.summation import ClientSum, SumMessage
from flower_ext.federation.sums.weighted import LOST, SUM, WEIGHTED_SUM, WEIGHTS
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.bounds import clip_each_row
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.secure.weighting.agreement import BEGIN, COUNT, DRAW, KEYS
from flower_ext.secure.weighting.protocol import protocol_of
from flower_ext.training import Params
from flower_ext.training.params import flat_rows

if TYPE_CHECKING:  # the import needs the extra ``weighting``; `protocol_of` loads it in a run
    from flower_ext.secure.weighting.silo_party import SiloParty

log = getLogger("flwr")


class WeightedSilo(ClientSum):
    """A silo's end of a weighted sum. Its contributions are of type `HiddenSum`."""

    name = WEIGHTED_SUM
    brings_weights = True

    def answer(self, data: Callable[[], ClientData], *, may_simulate: bool) -> bytes:
        """Answer one step of the set-up of a weighted sum, or of a secret draw.

        Raises
        ------
        ProtocolError
            The step is out of order or repeated.
        InvalidValue
            The server's message is malformed, or the data do not name the owner of each record.
        """
        partition, vault = partition_of(self.context.node_config), self._vault
        with _protocol_errors():
            step, content = self.message.of(BEGIN, KEYS, COUNT, DRAW)
            if step == BEGIN:
                silo: SiloParty | None = _begin(content, partition, vault, may_simulate)
            else:
                silo = stored_silo(vault)
            if silo is None:
                raise ProtocolError(
                    f"silo {partition} has no keys of this run: name a state-folder in its "
                    "node config, so that keys outlive the SuperNode, and start the run anew"
                )
            settings, counts = silo.settings, list[int]()
            if step == COUNT:
                counts = counts_of(data(), settings.users, settings.record_limit(silo.index))
            return silo.answer(step, content, counts)

    def hidden_sum(self, number: int, like: Params, users: int, bound: float) -> HiddenSum:
        """Begin this silo's sum over its users in training round ``number``."""
        silo = stored_silo(self._vault)
        return HiddenSum(
            silo, self.message, training_round=number, users=users, bound=bound, like=like
        )

    @property
    def _vault(self) -> ClientVault:
        return ClientVault(self.context, self.method)


def _begin(content: bytes, partition: int, vault: ClientVault, may_simulate: bool) -> SiloParty:
    """Return a silo with fresh keys, for the protocol and the settings in the server's message.

    Refuse to begin if this silo already has keys of the run. Outside simulation, also refuse
    insecure settings.
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

    A user with more records is counted as one with ``most`` records. An error would tell everybody
    that this silo has such a user. The weights of each user still sum to one.
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


class HiddenSum:
    """A silo's contribution to a weighted sum, which leaves the client only in encrypted form.

    The contribution is the sum of one clipped update for each user whom the set-up counted. If an
    update is not added, for example because the silo lost its data, it counts as zero. A silo that
    lost its keys trains no user's model, and sends a notice in place of a sum.

    If an update cannot be encrypted, all updates count as zero. If the silo sent nothing, it
    would reveal that it holds an unusual record.

    Parameters
    ----------
    silo : SiloParty, optional
        This silo's party of the protocol; None if it has lost its keys.
    message : SumMessage
        The server's message with the encrypted weights.
    training_round : int
        Number of the round.
    users : int
        Number of users over all silos, as the server's request says.
    bound : float
        Clipping norm of a user's update: the largest L2 distance by which one user moves the sum.
    like : Params
        Names and shapes of the sum.

    Raises
    ------
    ProtocolError
        The silo has contributed to the round before, or ``users`` differs from the set-up.
    """

    cell: ClassVar[None] = None

    def __init__(
        self,
        silo: SiloParty | None,
        message: SumMessage,
        *,
        training_round: int,
        users: int,
        bound: float,
        like: Params,
    ) -> None:
        self.bound, self.like = bound, like
        self._silo, self._training_round = silo, training_round
        self._counted = frozenset[int]()
        self._error: Exception | None = None
        if silo is None:
            return
        self._counted = frozenset(silo.counted)
        with _protocol_errors():
            _, self._weights = message.of(WEIGHTS)
            if users != silo.settings.users:
                raise ProtocolError(
                    f"the server asks for a round with {users} users: expected "
                    f"{silo.settings.users}, the number of users in the set-up"
                )
            self._sum = silo.open_sum(training_round, self._weights)

    @property
    def value(self) -> HiddenSum:
        """The object itself, which a method returns as the ``update`` of its `LocalResult`."""
        return self

    def includes(self, user: int) -> bool:
        """Return True if the set-up counted the user; the weight of any other user is zero."""
        return user in self._counted

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Clip one row of ``rows`` for each of ``users``, and add the rows to the sum.

        An error is kept for `noised`: several silos may train in one batch, so an exception here
        would end the work of the other silos.
        """
        clipped = clip_each_row(rows, self.bound)
        vectors = torch.cat([flat_rows(clipped[name]) for name in sorted(clipped)], dim=1)
        try:
            if self._error is None:
                self._sum.add(dict(zip(users, vectors.cpu().numpy(), strict=True)))
        except Exception as error:
            self._error = error

    def noised(self, noise: NoiseSource, stddev: float, grid: float | None) -> NamedArrays:
        """Return the upload: the encrypted sum of the updates and this silo's share of the noise.

        The protocol gets the noise unrounded, and rounds it to multiples of its own step, which is
        finer than ``grid``. Noise that was already rounded to ``grid`` would not hide the sum's
        values between the grid's points.

        Raises
        ------
        ProtocolError
            The silo has contributed to the round before.
        Exception
            Even a sum of zeros fails, so the updates are not the cause.
        """
        if self._silo is None:
            return {LOST: np.zeros(1, dtype=np.uint8)}
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self.like.items()}
        share = flattened(arrays_of(noise.gaussian(zeros, stddev)))
        with _protocol_errors():
            return {SUM: to_bytes_array(self._finished(self._silo, share))}

    def _finished(self, silo: SiloParty, noise: np.ndarray) -> bytes:
        try:
            if self._error is not None:
                raise self._error
            return self._sum.finish(noise)
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
            return silo.open_sum(self._training_round, self._weights).finish(noise)

    def in_numbers(self) -> NoReturn:
        """Refuse to return the sum, because it leaves the client only in encrypted form."""
        raise InvalidValue.tellable(
            "diagnostics=True: expected False, because the client encrypts its sum"
        )


@contextmanager
def _protocol_errors() -> Iterator[None]:
    """Send a `ProtocolError` to the server, because it depends only on steps, rounds and silos."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None
