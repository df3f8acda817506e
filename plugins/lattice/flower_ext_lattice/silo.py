"""A silo's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from gmpy2 import mpz

from flower_ext.errors import ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.messages import check_later, pack_numbers
from flower_ext.secure.weighting.agreement import SEEDING_SILO
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.silo_party import COUNTS, SetUpStage, SiloParty
from flower_ext_lattice import columns
from flower_ext_lattice.encrypted_sum import EncryptedSum
from flower_ext_lattice.keys import public_key
from flower_ext_lattice.messages import (
    LatticeKey,
    LatticeWeights,
    RoundOpening,
    check_round_number,
)
from flower_ext_lattice.ring import Reals
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.weighing import Weighing
from flower_ext_lattice.weights import OpenedWeights

_SUM = "sum"


@dataclass(repr=False)
class LatticeSilo(SiloParty):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    After the set-up of `SiloParty`, call `open_sum` in every round; or `receive_weights` in every
    epoch, and `begin` in every round.
    """

    kind = "lattice"
    settings_type = LatticeSettings

    settings: LatticeSettings
    last_epoch: int = 0
    weights_digest: bytes = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: OpenedWeights | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch whose weights this silo holds in memory; None without weights."""
        return None if self._weights is None else self._weights.epoch

    def receive_weights(self, message: LatticeWeights) -> None:
        """Take an epoch's weights. Before it opens them, the silo stores that the epoch is used.

        The silo accepts the weights of its last epoch again, for example after a restart, if they
        are the same to the last bit.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the epoch is below the last one, or it is the last one
            and the weights differ. Two sets of weights for one epoch would reveal N_u.
        ValueError
            The message is malformed.
        """
        self._expect(SetUpStage.COUNTED)
        message.check(self.settings)
        digest = hashlib.sha256(message.to_bytes()).digest()
        if message.epoch != self.last_epoch or digest != self.weights_digest:
            check_later("epoch", message.epoch, self.last_epoch)
            self._weights = None
            self.last_epoch, self.weights_digest = message.epoch, digest
            self.save(self.to_bytes())
        if self._weights is None:
            self._weights = self._open(message)

    def open_sum(self, number: int, weights: bytes) -> Weighing:
        """Begin this silo's sum of round ``number``. The round's epoch then counts as used.

        ``weights`` holds the server's weights and its opening of the round. The server sends the
        weights in every round. A silo that was restarted opens them again, which takes a fraction
        of a second.
        """
        size = LatticeWeights.size(self.settings)
        opening = RoundOpening.from_bytes(weights[size:], self.settings)
        if opening.round_number != number:
            raise ProtocolError(f"round {opening.round_number}: expected round {number}")
        self.receive_weights(LatticeWeights.from_bytes(weights[:size], self.settings))
        return self.begin(opening)

    def begin(self, opening: RoundOpening) -> Weighing:
        """Begin a round. Add users' updates to the result, a few at a time.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the round number is not above the last one, or the silo
            does not hold the weights of the round's epoch.
        """
        self._check_round(opening)
        counts = {user: count for user, count in enumerate(self.counts) if count}
        assert self._weights is not None  # the round belongs to its epoch
        return Weighing(
            self.settings,
            opening,
            silo=self.index,
            counts=counts,
            places={user: place for place, user in enumerate(self._order)},
            weights=self._weights,
            total=EncryptedSum(self.settings, self._public),
            masks=self._use_round,
        )

    @property
    def shifts(self) -> list[int]:
        """ρ_u of every place, which all silos share and the server does not know."""
        return self._transfer.choices

    @cached_property
    def _entry_keys(self) -> list[bytes]:
        """The key K_{u,ρ_u} of every place."""
        return self._transfer.keys()

    @cached_property
    def _public(self) -> Reals:
        return public_key(self._server_key.public_seed, self._server_key.words)

    def _count_answer(self) -> bytes:
        """Return the masked counts. Silo 0 adds the shifts ρ_u, and appends the transfer's choices.

        All silos derive the same choices ρ_u from their seed, so silo 0 answers for all.
        """
        counts, transfer = [self.counts[user] for user in self._order], b""
        if self.index == SEEDING_SILO:
            counts = [count + shift for count, shift in zip(counts, self.shifts, strict=True)]
            transfer = self._transfer.answer
        masked = self._pairs.masked(COUNTS, 0, counts, mpz(self.settings.table_size))
        return pack_numbers(masked, self.settings.count_bytes) + transfer

    def _check_draw(self, number: int) -> None:
        check_later("epoch", number, self.last_epoch)

    @cached_property
    def _server_key(self) -> LatticeKey:
        return LatticeKey.from_bytes(self.server_key, self.settings)

    def _check_server_key(self, server_key: bytes) -> None:
        key = LatticeKey.from_bytes(server_key, self.settings)
        public_key(key.public_seed, key.words)

    @cached_property
    def _transfer(self) -> Receiver:
        """The silos' side of the oblivious transfer. It chooses ρ_u, and is equal at all silos."""
        return Receiver(
            self._server_key.transfer,
            derive(self.seed, "transfer"),
            run=self.settings.context,
            transfers=self.settings.users,
            num_texts=self.settings.table_size,
        )

    def _open(self, message: LatticeWeights) -> OpenedWeights:
        """Open an epoch's weights with the keys of this silo."""
        opened_columns = []
        if self.settings.draw_choices is not None:
            receiver = self._draw_receiver(message.epoch, message.offer)
            opened_columns = columns.open_columns(receiver, message.columns)
        return OpenedWeights(
            self.settings,
            self._server_key.public_seed,
            message,
            keys=self._entry_keys,
            shifts=self.shifts,
            columns=opened_columns,
        )

    def _check_round(self, opening: RoundOpening) -> None:
        self._expect(SetUpStage.COUNTED)
        check_round_number(opening.round_number, self.last_round, self.settings)
        if self.epoch != opening.epoch:
            raise ProtocolError(
                f"round of epoch {opening.epoch}: expected weights of epoch {self.epoch}"
            )

    def _use_round(self, opening: RoundOpening) -> list[tuple[bytes, bool]]:
        """Store that the round is used, and return the keys of its masks."""
        self._check_round(opening)
        self.last_round = opening.round_number
        self.save(self.to_bytes())
        return self._pairs.mask_keys(_SUM, opening.round_number)
