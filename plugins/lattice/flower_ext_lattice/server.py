"""The server's side of private weighting over ring-LWE; the package describes the protocol."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flower_ext.secure.weighting.agreement import SEED_BYTES, SEEDING_SILO
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.server_party import ServerParty
from flower_ext_lattice import columns, weights
from flower_ext_lattice.columns import Columns
from flower_ext_lattice.encrypted_sum import decrypted
from flower_ext_lattice.keys import SecretKey
from flower_ext_lattice.messages import LatticeKey, LatticeSum, LatticeWeights
from flower_ext_lattice.settings import LatticeSettings


class LatticeServer(ServerParty[LatticeSettings, LatticeSum]):
    """The party that relays messages, encrypts masked weights, and decrypts sums.

    The weights of an epoch serve for one round if users are drawn, and otherwise for the whole run.
    """

    sum_type = LatticeSum

    def __init__(self, settings: LatticeSettings) -> None:
        super().__init__(settings)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._public_seed = secrets.token_bytes(SEED_BYTES)
        self._sender = Sender(settings.context)
        self._keys: list[bytes] = []
        self._shifted: list[int] = []
        self._weights_of_all: LatticeWeights | None = None

    @cached_property
    def public_key(self) -> bytes:
        """The bytes of a `LatticeKey`, for all silos."""
        return LatticeKey(
            public_seed=self._public_seed,
            transfer=self._sender.public,
            words=self._secret.public_words(self._public_seed),
        ).to_bytes()

    @cached_property
    def _secret(self) -> SecretKey:
        return SecretKey(self._key_seed)

    def _take_counts(self, counts: Mapping[int, bytes]) -> None:
        """Store N_u + ρ_u and the keys of the entries of every user, in the silos' secret order.

        After the counts, the message of silo 0 holds the silos' answer in the oblivious transfer,
        which hides their choices ρ_u. Computing the keys from this answer takes seconds.
        """
        users, size, answer = self.settings.users, self.settings.table_size, counts[SEEDING_SILO]
        end = users * self.settings.count_bytes
        self._shifted = self._totals({**counts, SEEDING_SILO: answer[:end]}, size)
        self._keys = self._sender.keys(answer[end:], users, size)

    def _decrypted(self, messages: Sequence[LatticeSum]) -> NDArray[np.float64]:
        return decrypted(self.settings, self._secret, messages)

    def _open_weights(self, number: int, places: Collection[int] | None) -> LatticeWeights:
        """Return fresh encryptions, or those of the first round if all users always take part."""
        if places is not None:
            drawn = set(places)
            taking_part = [(int(place in drawn),) for place in range(self.settings.users)]
            return self._encrypt(number, Columns(taking_part))
        if self._weights_of_all is None:
            self._weights_of_all = self._encrypt(number, Columns([(1,)] * self.settings.users))
        return self._weights_of_all

    def _sealed_weights(self, number: int, sender: Sender, choices: bytes) -> LatticeWeights:
        """Return weights in two columns (see `columns`), so that no party knows who is drawn."""
        drawn = columns.draw_columns(self.settings)
        sealed = columns.seal_columns(self.settings, drawn, sender, choices)
        return replace(self._encrypt(number, drawn), offer=sender.public, sealed_columns=sealed)

    def _encrypt(self, epoch: int, drawn: Columns) -> LatticeWeights:
        return weights.encrypt(
            self.settings,
            self._secret,
            self._public_seed,
            epoch=epoch,
            shifted=self._shifted,
            columns=drawn,
            keys=self._keys,
        )
