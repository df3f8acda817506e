"""A silo's side of private weighting over Paillier; the package describes the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import gmpy2
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.errors import ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.messages import check_later
from flower_ext.secure.pair_keys import uniform_residues
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.encrypted_sums import EncryptedSums
from flower_ext.secure.weighting.paillier_messages import (
    EncryptedWeights,
    MaskedSum,
    PaillierKey,
    SealedWeights,
    pack_ciphertexts,
)
from flower_ext.secure.weighting.silo_party import SiloParty, Stage

_SUM = "sum"


def user_blinds(seed: bytes, users: int, modulus: mpz) -> list[mpz]:
    """Return a unit modulo ``modulus`` for every user, uniform to a party without ``seed``."""

    def blind(user: int) -> mpz:
        for attempt in count():
            (drawn,) = uniform_residues(derive(seed, "blind", user, attempt), 1, modulus)
            if gmpy2.gcd(drawn, modulus) == 1:
                break
        return drawn

    return [blind(user) for user in range(users)]


class WeightingSilo(SiloParty[WeightingSettings, PaillierKey]):
    """One silo. After the set-up of `SiloParty`, call `open_sum` or `weigh` for every round.

    Parameters
    ----------
    settings, index, **options
        As for `SiloParty`.
    """

    settings_type = WeightingSettings
    server_key_type = PaillierKey

    def open_sum(self, number: int, weights: bytes) -> WholeSum:
        """Begin this silo's sum of round ``number``."""
        kind = EncryptedWeights if self.settings.draw_choices is None else SealedWeights
        message = kind.from_bytes(weights, self.settings)
        if message.round_number != number:
            raise ProtocolError(f"weights of round {message.round_number}: expected round {number}")
        return WholeSum(self, message)

    def weigh(
        self,
        message: EncryptedWeights | SealedWeights,
        updates: Mapping[int, ArrayLike],
        noise: ArrayLike,
    ) -> MaskedSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Clipped update of every user with records in this silo, by user. Each has shape
            (coordinates,) and lies within ``settings.update_bound``.
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the round number is not above the last, weights are
            sealed although the settings have no ``draw_choices``, or they are not sealed although
            the settings have them.
        ValueError
            Weights are malformed; updates belong to other users than those with records here;
            shapes are wrong; or values are not finite or out of bounds. Nothing has left the silo
            then, so call `weigh` again for the same round.
        """
        self._expect(Stage.COUNTED)
        check_later("round", message.round_number, self._last_round)
        users = self.counted
        encoded = self._sums.encode_updates(updates, users)
        encoded_noise = self._sums.encode_noise(noise)
        powers = self._sums.fold(self._opened(message), self._factors(users))
        progress = self._watch(f"silo {self.index}, round {message.round_number}: coordinates")
        ciphertexts = self._sums.noised(powers, encoded, encoded_noise, progress)
        # Only what follows draws masks. Until here an error leaves the round unused.
        self._last_round = message.round_number
        self._store()
        self._mask(ciphertexts, message.round_number)
        self._rerandomise_share(ciphertexts, message.round_number)
        return MaskedSum(
            round_number=message.round_number,
            silo=self.index,
            ciphertexts=pack_ciphertexts(ciphertexts, self.settings),
        )

    @property
    def _count_modulus(self) -> int:
        return int(self._sums.public.n)

    def _hidden_counts(self) -> list[int]:
        return [int(self._blinds[user] * self._counts[user]) for user in self._order]

    def _check_draw(self, number: int) -> None:
        check_later("round", number, self._last_round)

    @cached_property
    def _sums(self) -> EncryptedSums:
        public = self._known_server_key.public
        return EncryptedSums(self.settings, public, workers=self._workers)

    def _check_server_key(self, server_key: PaillierKey) -> None:
        most = self.settings.max_records_per_user
        server_key.public.check(self.settings.key_bits, coprime_to=most)

    def _take_seed(self, seed: bytes) -> None:
        super()._take_seed(seed)
        self._blinds = user_blinds(seed, self.settings.users, self._sums.public.n)

    def _opened(self, message: EncryptedWeights | SealedWeights) -> bytes:
        """Return one ciphertext per user, by place in the secret order."""
        if isinstance(message, EncryptedWeights):
            if self.settings.draw_choices is not None:
                raise ProtocolError(
                    "EncryptedWeights under settings with draw_choices: expected SealedWeights"
                )
            message.check(self.settings)
            return message.weights
        receiver = self._draw_receiver(message.round_number, message.public)
        return b"".join(receiver.open_joined(message.sealed, self.settings.ciphertext_bytes))

    def _factors(self, users: Sequence[int]) -> dict[int, mpz]:
        """Return n_su · r_u · C_LCM of each of ``users``, by place in the secret order."""
        n, multiple = self._sums.public.n, self.settings.common_multiple
        place = {user: at for at, user in enumerate(self._order)}
        return {
            place[user]: self._counts[user] * self._blinds[user] * multiple % n for user in users
        }

    def _mask(self, ciphertexts: list[mpz], round_number: int) -> None:
        """Multiply, in place, by masks whose product over the silos is one."""
        n_squared = self._sums.public.n_squared
        masks = self._pairs.multiplicative_masks(_SUM, round_number, len(ciphertexts), n_squared)
        for at, mask in enumerate(masks):
            ciphertexts[at] = ciphertexts[at] * mask % n_squared

    def _rerandomise_share(self, ciphertexts: list[mpz], round_number: int) -> None:
        """Re-randomise, in place, the ciphertexts whose turn falls on this silo in this round."""
        first = (self.index - round_number) % self.settings.silos
        self._sums.rerandomise(ciphertexts, range(first, len(ciphertexts), self.settings.silos))


class WholeSum:
    """A silo's sum of one round. It needs all updates at once, because it works by coordinates."""

    def __init__(self, silo: WeightingSilo, weights: EncryptedWeights | SealedWeights) -> None:
        self._silo, self._weights = silo, weights
        self._updates: dict[int, NDArray[Any]] = {}

    def add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Keep updates until all users' updates have arrived."""
        self._updates |= updates

    def finish(self, noise: NDArray[Any]) -> bytes:
        """Return the masked sum; the round then counts as used."""
        return self._silo.weigh(self._weights, self._updates, noise).to_bytes()
