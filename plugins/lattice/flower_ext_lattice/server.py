"""The server's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import ProtocolError
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.party import Dialogue, Stage
from flower_ext.secure.weighting.server_party import ServerParty
from flower_ext.secure.weighting.weighting_messages import (
    SEED_BYTES,
    DrawAnswer,
    DrawOffer,
    MaskedCounts,
)
from flower_ext_lattice import columns, weights
from flower_ext_lattice.columns import Columns
from flower_ext_lattice.encrypted_sum import decrypted
from flower_ext_lattice.keys import SecretKey
from flower_ext_lattice.messages import (
    LatticeKey,
    LatticeSum,
    LatticeWeights,
    RoundOpening,
    TransferAnswer,
    check_round_number,
)
from flower_ext_lattice.settings import LatticeSettings


class LatticeServer(ServerParty[LatticeSettings, LatticeSum]):
    """The party that relays messages, encrypts weights without knowing them, and decrypts sums.

    Take the steps of `ServerParty`, with `receive_answer` before `receive_counts`. Then call
    `open_epoch` whenever users are drawn, and `open_round` and `close_round` for every round. If
    the settings have ``draw_choices``, open an epoch with `offer_draw` and `open_drawn_epoch`
    instead.

    Parameters
    ----------
    settings, **options
        As for `ServerParty`.
    """

    sum_type = LatticeSum

    def __init__(self, settings: LatticeSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._public_seed = secrets.token_bytes(SEED_BYTES)
        self._sender = Sender(settings.context)
        self._keys: list[bytes] = []
        self._shifted: list[int] = []
        self._last_epoch = 0
        self._epoch: int | None = None
        self._weights = b""

    @cached_property
    def public_key(self) -> LatticeKey:
        """The server's public key, for all silos."""
        return LatticeKey(
            public_seed=self._public_seed,
            transfer=self._sender.public,
            words=self._secret.public_words(self._public_seed),
        )

    @property
    def epoch(self) -> int | None:
        """Number of the open epoch; None before the first epoch."""
        return self._epoch

    def begin_round(self, number: int, places: Collection[int] | None) -> Dialogue[bytes]:
        """Encrypt the weights of the round's users, in a new epoch if users are drawn."""
        if self.settings.draw_choices is not None:
            answer = yield from self._ask_draw(self.offer_draw())
            self._weights = self.open_drawn_epoch(answer).to_bytes()
        elif places is not None or not self._weights:
            self._weights = self.open_epoch(sampled=places).to_bytes()
        return self._weights + self.open_round(number).to_bytes()

    def receive_answer(self, message: TransferAnswer) -> None:
        """Take the silos' choices and compute the keys of all places, which takes seconds.

        Raises
        ------
        ProtocolError
            The seed was not relayed yet, or the choices were received before.
        ValueError
            The message is malformed.
        """
        self._expect(Stage.SEEDED)
        if self._keys:
            raise ProtocolError("the silos' choices were received before: expected them once")
        message.check(self.settings)
        places = [self.settings.table_size] * self.settings.users
        self._keys = self._sender.keys(message.answer, places, workers=self._workers)

    def receive_counts(self, messages: Sequence[MaskedCounts]) -> None:
        """Add the masked counts of all silos: N_u + ρ_u modulo M.

        Raises
        ------
        ProtocolError
            The silos' choices have not arrived, or the counts were received before.
        IncompleteRound
            A silo's counts are missing.
        ValueError
            A message is malformed, comes from a silo that the run does not have, or was sent twice.
        """
        if not self._keys:
            raise ProtocolError("the silos' choices are missing: call receive_answer first")
        super().receive_counts(messages)

    def open_epoch(self, *, sampled: Collection[int] | None = None) -> LatticeWeights:
        """Return fresh encryptions of the users' weights, for all silos.

        The server abandons a round that is still open.

        Parameters
        ----------
        sampled : Collection of int, optional
            Users that take part, as places from 0 to users - 1 in the silos' secret order. The
            other users get an encryption of zero. By default all users take part.

        Raises
        ------
        ProtocolError
            The counts have not arrived, or the settings have ``draw_choices``.
        ValueError
            ``sampled`` holds a place outside the range.
        """
        self._expect(Stage.COUNTED)
        self._refuse_secret_draw()
        drawn = self._drawn_places(sampled)
        self._use_epoch()
        return self._encrypt(
            Columns([(int(place in drawn),) for place in range(self.settings.users)])
        )

    def offer_draw(self) -> DrawOffer:
        """Begin an epoch with a secret draw of users. Send the offer to the silo that answers.

        Raises
        ------
        ProtocolError
            The counts have not arrived, or the settings have no ``draw_choices``.
        """
        self._expect(Stage.COUNTED)
        self._expect_secret_draw()
        self._use_epoch()
        return self._offer_draw(self._last_epoch)

    def open_drawn_epoch(self, message: DrawAnswer) -> LatticeWeights:
        """Return fresh encryptions of the users' weights, of which no party knows who was drawn.

        Raises
        ------
        ProtocolError
            The last `offer_draw` was for another epoch, or this epoch was opened before.
        ValueError
            The message is malformed.
        """
        sender = self._sender_for(message)
        drawn = columns.draw_columns(self.settings)
        sealed = columns.seal_columns(
            self.settings, drawn, sender, message.answer, workers=self._workers
        )
        return replace(self._encrypt(drawn), offer=sender.public, columns=sealed)

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
            The server opened no epoch, or the round number is not above the last
            one or is above the settings' ``rounds``.
        """
        self._expect(Stage.COUNTED)
        if self._epoch is None:
            raise ProtocolError("open_round: expected open_epoch before it")
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
        progress = self._watch("decryption")
        return decrypted(
            self.settings, self._secret, messages, workers=self._workers, progress=progress
        )

    @cached_property
    def _secret(self) -> SecretKey:
        return SecretKey(self._key_seed)

    @property
    def _count_modulus(self) -> int:
        return self.settings.table_size

    @property
    def _added_bytes(self) -> int:
        return TransferAnswer.size(self.settings)

    def _take_added(self, data: bytes) -> None:
        self.receive_answer(TransferAnswer.from_bytes(data, self.settings))

    def _take_totals(self, totals: list[int]) -> None:
        self._shifted = totals

    def _check_sum_of_round(self, message: LatticeSum) -> None:
        if (message.round_number, message.epoch) != (self._open_round, self._epoch):
            raise ProtocolError(
                f"sum of round {message.round_number} and epoch {message.epoch}: expected "
                f"round {self._open_round} and epoch {self._epoch}"
            )

    def _use_epoch(self) -> None:
        """Abandon the open round and draw, and use a new epoch."""
        self._open_round = self._epoch = self._drawing = None
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
