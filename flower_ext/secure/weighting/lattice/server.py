"""The server's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.lattice import draw, weights
from flower_ext.secure.weighting.lattice.draw import Columns
from flower_ext.secure.weighting.lattice.keys import SecretKey
from flower_ext.secure.weighting.lattice.messages import (
    COUNT_BYTES,
    SEED_BYTES,
    DrawAnswer,
    DrawOffer,
    LatticeSum,
    LatticeWeights,
    MaskedCounts,
    RoundOpening,
    SealedSeed,
    ServerKey,
    SiloKey,
    TransferAnswer,
    check_round_number,
)
from flower_ext.secure.weighting.lattice.party import Party
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.state import ServerStage, ServerState
from flower_ext.secure.weighting.lattice.sums import decrypted
from flower_ext.secure.weighting.messages import check_all_there, check_keys, check_senders
from flower_ext.secure.weighting.oblivious import Sender


class LatticeServer(Party[ServerStage]):
    """The party that relays messages, encrypts weights without knowing them, and decrypts sums.

    Call `public_key`, `relay_keys`, `relay_seed`, `receive_answer` and `receive_counts` once, in
    this order, then `open_epoch` whenever users are drawn, and `open_round` and `close_round` for
    every round. If the settings have ``draw_choices``, open an epoch with `offer_draw` and
    `open_drawn_epoch` instead.

    Parameters
    ----------
    settings : LatticeSettings
    save : callable, optional
        Stores `export_state` durably. The server calls it before it returns a message that must not
        be sent again in another form, so that a server restored from the stored state never reuses
        an epoch or a round.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__(settings, ServerStage.NEW, save=save, workers=workers)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._public_seed = secrets.token_bytes(SEED_BYTES)
        self._nonce = secrets.token_bytes(SEED_BYTES)
        self._sender = Sender(settings.context)
        self._answer = b""
        self._keys: list[bytes] | None = None
        self._shifted: list[int] = []
        self._last_epoch = self._last_round = 0
        self._epoch: int | None = None
        self._open_round: int | None = None
        self._drawing: tuple[int, Sender] | None = None

    def __repr__(self) -> str:
        return f"LatticeServer(run={self.settings.run!r}, last_round={self._last_round})"

    @cached_property
    def public_key(self) -> ServerKey:
        """The server's public facts, for all silos."""
        self._store()
        return ServerKey(
            public_seed=self._public_seed,
            nonce=self._nonce,
            transfer=self._sender.public,
            words=self._secret.public_words(self._public_seed),
        )

    @property
    def epoch(self) -> int | None:
        """Number of the open epoch; None before the first epoch and after a restart."""
        return self._epoch

    def relay_keys(self, keys: Sequence[SiloKey]) -> tuple[SiloKey, ...]:
        """Return the silos' public keys, for all silos.

        Raises
        ------
        ProtocolError
            The keys were relayed before.
        ValueError
            There is not exactly one key from each silo, or a key is malformed or of low order.
        """
        self._expect(ServerStage.NEW)
        for key in keys:
            key.check(self.settings)
        check_senders([key.silo for key in keys], range(self.settings.silos))
        check_keys({key.silo: key.public for key in keys})
        self._advance(ServerStage.KEYS_RELAYED)
        return tuple(sorted(keys, key=lambda key: key.silo))

    def relay_seed(self, seeds: Sequence[SealedSeed]) -> tuple[SealedSeed, ...]:
        """Return silo 0's sealed seeds, each for its receiver.

        Raises
        ------
        ProtocolError
            The public keys were not relayed yet, or the seed was relayed before.
        ValueError
            There is not exactly one seed for each silo except silo 0.
        """
        self._expect(ServerStage.KEYS_RELAYED)
        for seed in seeds:
            seed.check(self.settings)
        check_senders([seed.receiver for seed in seeds], range(1, self.settings.silos))
        self._advance(ServerStage.SEED_RELAYED)
        return tuple(sorted(seeds, key=lambda seed: seed.receiver))

    def receive_answer(self, message: TransferAnswer) -> None:
        """Take the silos' choices and compute the keys of all places, which takes seconds.

        Raises
        ------
        ProtocolError
            The seed was not relayed yet, or the choices were received before.
        ValueError
            The message is malformed.
        """
        self._expect(ServerStage.SEED_RELAYED)
        message.check(self.settings)
        self._keys = self._transfer_keys(message.answer)
        self._answer = message.answer
        self._advance(ServerStage.ANSWERED)

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
        self._expect(ServerStage.ANSWERED)
        check_all_there([message.silo for message in messages], self.settings.silos)
        choices = self.settings.choices
        totals = np.zeros(self.settings.users, np.int64)
        for message in messages:
            message.check(self.settings)
            counts = np.frombuffer(message.counts, f">u{COUNT_BYTES}").astype(np.int64)
            if counts.max() >= choices:
                raise InvalidValue(f"counts of silo {message.silo}: expected numbers below M")
            totals += counts
        self._shifted = [int(total) for total in totals % choices]
        self._advance(ServerStage.COUNTED)

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
        self._expect(ServerStage.COUNTED)
        if self.settings.draw_choices is not None:
            raise ProtocolError(
                "open_epoch under settings with draw_choices: call offer_draw and "
                "open_drawn_epoch instead"
            )
        everyone = range(self.settings.users)
        drawn = set(everyone if sampled is None else sampled)
        if not drawn <= set(everyone):
            raise InvalidValue(f"sampled: expected integers from 0 to {self.settings.users - 1}")
        self._use_epoch()
        return self._encrypt(Columns([(int(place in drawn),) for place in everyone]))

    def offer_draw(self) -> DrawOffer:
        """Begin an epoch with a secret draw of users. Send the offer to the silo that answers.

        Raises
        ------
        ProtocolError
            The counts have not arrived, or the settings have no ``draw_choices``.
        """
        self._expect(ServerStage.COUNTED)
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "offer_draw: the settings have no draw_choices; call open_epoch instead"
            )
        self._use_epoch()
        sender = Sender(self.settings.context)
        self._drawing = self._last_epoch, sender
        return DrawOffer(epoch=self._last_epoch, public=sender.public)

    def open_drawn_epoch(self, message: DrawAnswer) -> LatticeWeights:
        """Return fresh encryptions of the users' weights, of which no party knows who was drawn.

        Raises
        ------
        ProtocolError
            The last `offer_draw` was for another epoch, or this epoch was opened before.
        ValueError
            The message is malformed.
        """
        if self._drawing is None or self._drawing[0] != message.epoch:
            raise ProtocolError(
                f"draw of epoch {message.epoch}: expected offer_draw for this epoch first"
            )
        message.check(self.settings)
        (_, sender), self._drawing = self._drawing, None
        made = draw.columns(self.settings)
        sealed = draw.sealed(self.settings, made, sender, message.answer, workers=self._workers)
        return replace(self._encrypt(made), offer=sender.public, columns=sealed)

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
        self._expect(ServerStage.COUNTED)
        if self._epoch is None:
            raise ProtocolError("open_round: expected open_epoch before it, also after a restart")
        check_round_number(round_number, self._last_round, self.settings)
        self._last_round = round_number
        self._store()
        self._open_round = round_number
        return RoundOpening(round_number=round_number, epoch=self._epoch)

    def check_sum(self, message: LatticeSum) -> None:
        """Check one silo's sum as soon as it arrives, before the other silos have answered.

        Raises
        ------
        ProtocolError
            No round is open, or the message belongs to another round or epoch.
        ValueError
            The message is malformed, or comes from a silo that the run does not have.
        """
        if self._open_round is None:
            raise ProtocolError(
                "no round is open: call open_round and send its message to the silos"
            )
        if (message.round_number, message.epoch) != (self._open_round, self._epoch):
            raise ProtocolError(
                f"sum of round {message.round_number} and epoch {message.epoch}: expected "
                f"round {self._open_round} and epoch {self._epoch}"
            )
        message.check(self.settings)

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
        for message in messages:
            self.check_sum(message)
        if self._open_round is None:
            raise ProtocolError(
                "no round is open: call open_round and send its message to the silos"
            )
        check_all_there([message.silo for message in messages], self.settings.silos)
        self._open_round = None
        return decrypted(
            self.settings, self._secret, messages, workers=self._workers, progress=progress
        )

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds the secret key in the clear. Store it where nobody else can read it.
        """
        state = ServerState(
            stage=self._stage,
            key_seed=self._key_seed,
            public_seed=self._public_seed,
            nonce=self._nonce,
            exponent=self._sender.exponent,
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
    ) -> LatticeServer:
        """Return a server at the stage of the exported one.

        Its epochs and rounds stay used, so call `open_epoch` first. That computes the keys of the
        transfer again, which takes seconds.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        kept = ServerState.decode(state, settings)
        server = cls(settings, workers=workers)
        server._stage = kept.stage
        server._key_seed = kept.key_seed
        server._public_seed = kept.public_seed
        server._nonce = kept.nonce
        server._sender = Sender(settings.context, exponent=kept.exponent)
        server._answer = kept.answer
        server._shifted = kept.shifted
        server._last_epoch = kept.last_epoch
        server._last_round = kept.last_round
        server._save = save
        return server

    @cached_property
    def _secret(self) -> SecretKey:
        return SecretKey(self._key_seed)

    @property
    def _name(self) -> str:
        return "the server"

    def _use_epoch(self) -> None:
        """Store that a new epoch is used; abandon the open round and draw."""
        self._open_round = self._epoch = self._drawing = None
        self._last_epoch += 1
        self._store()

    def _encrypt(self, columns: Columns) -> LatticeWeights:
        if self._keys is None:
            self._keys = self._transfer_keys(self._answer)
        message = weights.encrypt(
            self.settings,
            self._secret,
            self._public_seed,
            epoch=self._last_epoch,
            shifted=self._shifted,
            columns=columns,
            keys=self._keys,
        )
        self._epoch = self._last_epoch
        return message

    def _transfer_keys(self, answer: bytes) -> list[bytes]:
        choices = [self.settings.choices] * self.settings.users
        return self._sender.keys(answer, choices, workers=self._workers)
