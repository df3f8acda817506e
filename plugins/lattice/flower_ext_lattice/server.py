"""The server's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import ProtocolError
from flower_ext.secure.weighting.agreement import SEED_BYTES, SEEDING_SILO, Dialogue
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.server_party import ServerParty
from flower_ext_lattice import columns, weights
from flower_ext_lattice.columns import Columns
from flower_ext_lattice.encrypted_sum import decrypted
from flower_ext_lattice.keys import SecretKey
from flower_ext_lattice.messages import (
    LatticeKey,
    LatticeSum,
    LatticeWeights,
    RoundOpening,
    check_round_number,
)
from flower_ext_lattice.settings import LatticeSettings


class LatticeServer(ServerParty[LatticeSettings, LatticeSum]):
    """The party that relays messages, encrypts weights that it does not know, and decrypts sums.

    Each round belongs to an epoch, which lasts until other users are drawn: see `begin_round`.
    """

    sum_type = LatticeSum

    def __init__(self, settings: LatticeSettings) -> None:
        super().__init__(settings)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._public_seed = secrets.token_bytes(SEED_BYTES)
        self._sender = Sender(settings.context)
        self._keys: list[bytes] = []
        self._shifted: list[int] = []
        self._last_epoch = 0
        self._epoch: int | None = None
        self._weights = b""

    @cached_property
    def public_key(self) -> bytes:
        """A `LatticeKey`, for all silos."""
        return LatticeKey(
            public_seed=self._public_seed,
            transfer=self._sender.public,
            words=self._secret.public_words(self._public_seed),
        ).to_bytes()

    @property
    def epoch(self) -> int | None:
        """Number of the open epoch; None before the first epoch."""
        return self._epoch

    def begin_round(self, number: int, places: Collection[int] | None) -> Dialogue[bytes]:
        """Begin a round, and return its weights followed by its opening, as one message.

        The round begins a new epoch if users are drawn, by the server (``places``) or secretly, and
        if there is no epoch yet. Otherwise it uses the weights of the last epoch.
        """
        if self.settings.draw_choices is not None and places is None:
            weights = yield from self._draw_epoch()
            self._weights = weights.to_bytes()
        elif places is not None or not self._weights:
            self._weights = self.open_epoch(places=places).to_bytes()
        return self._weights + self.open_round(number).to_bytes()

    def open_epoch(self, *, places: Collection[int] | None = None) -> LatticeWeights:
        """Return fresh encryptions of the users' weights, for all silos.

        The server abandons a round that is still open.

        Parameters
        ----------
        places : Collection of int, optional
            Places, in the silos' secret order, of the users that take part. The other users get an
            encryption of zero. By default all users take part.

        Raises
        ------
        ProtocolError
            The set-up is not complete, or the settings have ``draw_choices``.
        ValueError
            A place is out of range.
        """
        self._expect_set_up()
        drawn = self._drawn_places(places)
        self._use_epoch()
        return self._encrypt(
            Columns([(int(place in drawn),) for place in range(self.settings.users)])
        )

    def open_round(self, round_number: int) -> RoundOpening:
        """Begin a round under the weights of the last epoch, for all silos.

        The server abandons an earlier round that is still open.

        Parameters
        ----------
        round_number : int
            Higher than the number of every earlier round.

        Raises
        ------
        ProtocolError
            The server opened no epoch, or the round number is not above the last one or is above
            the settings' ``rounds``.
        """
        self._expect_set_up()
        if self._epoch is None:
            raise ProtocolError("open_round: call open_epoch first, which encrypts the weights")
        check_round_number(round_number, self._last_round, self.settings)
        self._last_round = round_number
        self._open_round = round_number
        return RoundOpening(round_number=round_number, epoch=self._epoch)

    def close_round(self, messages: Sequence[LatticeSum]) -> NDArray[np.float64]:
        """Return the weighted, noised sum over all silos, (coordinates,), in whole steps.

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; the round stays open.
        ProtocolError
            No round is open, or a message belongs to another round or epoch.
        ValueError
            A message is malformed, comes from a silo that the run does not have, or was sent twice.
        """
        self._check_sums(messages)
        self._open_round = None
        return decrypted(self.settings, self._secret, messages)

    @cached_property
    def _secret(self) -> SecretKey:
        return SecretKey(self._key_seed)

    def _take_counts(self, counts: Mapping[int, bytes]) -> None:
        """Store N_u + ρ_u of every place, and the keys of the places' entries.

        The message of silo 0 also holds the silos' choices ρ_u of the oblivious transfer, after
        the counts. Computing the keys from these choices takes seconds.
        """
        users, size, answer = self.settings.users, self.settings.table_size, counts[SEEDING_SILO]
        end = users * self.settings.count_bytes
        self._shifted = self._totals({**counts, SEEDING_SILO: answer[:end]}, size)
        self._keys = self._sender.keys(answer[end:], users, size)

    def _check_round_of(self, message: LatticeSum) -> None:
        super()._check_round_of(message)
        if message.epoch != self._epoch:
            raise ProtocolError(f"sum of epoch {message.epoch}: expected epoch {self._epoch}")

    def _draw_epoch(self) -> Dialogue[LatticeWeights]:
        """Begin an epoch in which no party knows who was drawn, and return its weights."""
        self._expect_set_up()
        self._use_epoch()
        sender, choices = yield from self._draw(self._last_epoch)
        drawn = columns.draw_columns(self.settings)
        sealed = columns.seal_columns(self.settings, drawn, sender, choices)
        return replace(self._encrypt(drawn), offer=sender.public, columns=sealed)

    def _use_epoch(self) -> None:
        """Abandon the open round, and take the number of the next epoch."""
        self._open_round = self._epoch = None
        self._last_epoch += 1

    def _encrypt(self, drawn: Columns) -> LatticeWeights:
        message = weights.encrypt(
            self.settings,
            self._secret,
            self._public_seed,
            epoch=self._last_epoch,
            shifted=self._shifted,
            columns=drawn,
            keys=self._keys,
        )
        self._epoch = self._last_epoch
        return message
