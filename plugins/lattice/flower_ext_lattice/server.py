"""The server's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import ProtocolError
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.party_state import Stage
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
from flower_ext_lattice.state import LatticeServerState


class LatticeServer(ServerParty[LatticeSettings, LatticeSum]):
    """The party that relays messages, encrypts weights without knowing them, and decrypts sums.

    Take the steps of `ServerParty`, with `receive_answer` before `receive_counts`. Then call
    `open_epoch` whenever users are drawn, and `open_round` and `close_round` for every round. If
    the settings have ``draw_choices``, open an epoch with `offer_draw` and `open_drawn_epoch`
    instead.

    Parameters
    ----------
    settings, save, workers
        As for `ServerParty`.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__(settings, save=save, workers=workers)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._public_seed = secrets.token_bytes(SEED_BYTES)
        self._sender = Sender(settings.context)
        self._answer = b""
        self._keys: list[bytes] | None = None
        self._shifted: list[int] = []
        self._last_epoch = 0
        self._epoch: int | None = None

    @cached_property
    def public_key(self) -> LatticeKey:
        """The server's public key, for all silos."""
        self._store()
        return LatticeKey(
            public_seed=self._public_seed,
            transfer=self._sender.public,
            words=self._secret.public_words(self._public_seed),
        )

    @property
    def epoch(self) -> int | None:
        """Number of the open epoch; None before the first epoch and after a restart."""
        return self._epoch

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
        if self._answer:
            raise ProtocolError("the silos' choices were received before: expected them once")
        message.check(self.settings)
        self._keys = self._transfer_keys(message.answer)
        self._answer = message.answer
        self._store()

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
        if not self._answer:
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
            The server opened no epoch since its start, or the round number is not above the last
            one or is above the settings' ``rounds``.
        """
        self._expect(Stage.COUNTED)
        if self._epoch is None:
            raise ProtocolError("open_round: expected open_epoch before it, also after a restart")
        check_round_number(round_number, self._last_round, self.settings)
        self._last_round = round_number
        self._store()
        self._open_round = round_number
        return RoundOpening(round_number=round_number, epoch=self._epoch)

    def close_round(
        self, messages: Sequence[LatticeSum], *, progress: Progress | None = None
    ) -> NDArray[np.float64]:
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
        return decrypted(
            self.settings, self._secret, messages, workers=self._workers, progress=progress
        )

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds the secret key in the clear. Store it where nobody else can read it.
        """
        state = LatticeServerState(
            stage=self._stage,
            key_seed=self._key_seed,
            public_seed=self._public_seed,
            transfer_secret=self._sender.secret,
            answer=self._answer,
            shifted=self._shifted,
            last_epoch=self._last_epoch,
            last_round=self._last_round,
        )
        return state.encode(self.settings)

    @classmethod
    def from_state(
        cls,
        settings: LatticeSettings,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> Self:
        """Return a server at the stage of the exported one.

        Its epochs and rounds stay used, so call `open_epoch` first. That computes the keys of the
        transfer again, which takes seconds.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        stored = LatticeServerState.decode(state, settings)
        server = cls(settings, workers=workers)
        server._stage = stored.stage
        server._key_seed = stored.key_seed
        server._public_seed = stored.public_seed
        server._sender = Sender(settings.context, secret=stored.transfer_secret)
        server._answer = stored.answer
        server._shifted = stored.shifted
        server._last_epoch = stored.last_epoch
        server._last_round = stored.last_round
        server._save = save
        return server

    @cached_property
    def _secret(self) -> SecretKey:
        return SecretKey(self._key_seed)

    @property
    def _count_modulus(self) -> int:
        return self.settings.table_size

    def _take_totals(self, totals: list[int]) -> None:
        self._shifted = totals

    def _check_sum_of_round(self, message: LatticeSum) -> None:
        if (message.round_number, message.epoch) != (self._open_round, self._epoch):
            raise ProtocolError(
                f"sum of round {message.round_number} and epoch {message.epoch}: expected "
                f"round {self._open_round} and epoch {self._epoch}"
            )

    def _use_epoch(self) -> None:
        """Store that a new epoch is used; abandon the open round and draw."""
        self._open_round = self._epoch = self._drawing = None
        self._last_epoch += 1
        self._store()

    def _encrypt(self, drawn: Columns) -> LatticeWeights:
        if self._keys is None:
            self._keys = self._transfer_keys(self._answer)
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

    def _transfer_keys(self, answer: bytes) -> list[bytes]:
        places = [self.settings.table_size] * self.settings.users
        return self._sender.keys(answer, places, workers=self._workers)
