"""A silo's side of private weighting over Paillier; the package describes the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import gmpy2
from gmpy2 import mpz

from flower_ext.errors import ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.messages import check_later, check_length, pack_numbers
from flower_ext.secure.pair_keys import uniform_residues
from flower_ext.secure.threads import map_slices
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSettings,
    PaillierWeights,
    unpack_ciphertexts,
)
from flower_ext.secure.weighting.paillier_sum import PaillierOpenSum
from flower_ext.secure.weighting.silo_party import COUNTS, SetUpStage, SiloParty

_SUM = "sum"


def user_blinds(seed: bytes, users: int, modulus: mpz) -> list[mpz]:
    """Return a unit modulo ``modulus`` for each user, uniform to a party without the seed."""

    def blind(user: int) -> mpz:
        for attempt in count():
            (drawn,) = uniform_residues(derive(seed, "blind", user, attempt), 1, modulus)
            if gmpy2.gcd(drawn, modulus) == 1:
                break
        return drawn

    return [blind(user) for user in range(users)]


@dataclass(repr=False)
class PaillierSilo(SiloParty):
    """One silo. Take the steps of the set-up with `answer`, then call `open_sum` every round."""

    kind = "paillier"
    settings_type = PaillierSettings

    settings: PaillierSettings

    def open_sum(self, number: int, weights: bytes) -> PaillierOpenSum:
        """Begin this silo's sum of round ``number``."""
        self._expect(SetUpStage.COUNTED)
        message = PaillierWeights.from_bytes(weights, self.settings)
        if message.round_number != number:
            raise ProtocolError(f"weights of round {message.round_number}: expected round {number}")
        check_later("round", number, self.last_round)
        return PaillierOpenSum(
            self.settings,
            message,
            silo=self.index,
            users=self.counted,
            public=self.public,
            weights=lambda: self._weights(message),
            masks=self._use_round,
        )

    def _weights(self, message: PaillierWeights) -> list[mpz]:
        """Return the ciphertext Enc(n_su / N_u · C_LCM) of each user with records in this silo.

        Each ciphertext takes one long exponentiation, and all coordinates of the user's update then
        share it.

        Raises
        ------
        ValueError
            A number is not a ciphertext, or was sealed for another answer of the silos.
        """
        settings, public = self.settings, self.public
        inverses = unpack_ciphertexts(self._opened(message), settings, public)
        place = {user: at for at, user in enumerate(self._order)}

        def fold(users: Sequence[int]) -> list[mpz]:
            folded = []
            for user in users:
                # The server inverted r_u N_u, so the blind r_u cancels. C_LCM makes 1 / N_u whole.
                blinded = self.counts[user] * self._blinds[user]
                factor = blinded * settings.common_multiple % public.n
                folded.append(gmpy2.powmod(inverses[place[user]], factor, public.n_squared))
            return folded

        return map_slices(fold, self.counted)

    def _opened(self, message: PaillierWeights) -> bytes:
        """Return the ciphertexts of all users, joined, by place in the secret order.

        If users are drawn in secret, the silo opens the chosen ciphertext of each user.
        """
        if self.settings.draw_choices is None:
            return message.weights
        receiver = self._draw_receiver(message.round_number, message.offer)
        return b"".join(receiver.open(message.weights, self.settings.ciphertext_bytes))

    def _use_round(self, number: int, count: int) -> list[mpz]:
        """Store that the round is used, and return masks for ``count`` ciphertexts.

        Raises
        ------
        ProtocolError
            This round, or a later one, was used before.
        """
        check_later("round", number, self.last_round)
        self.last_round = number
        self.save(self.to_bytes())
        return self._pairs.multiplicative_masks(_SUM, number, count, self.public.n_squared)

    @cached_property
    def public(self) -> PublicKey:
        """The server's key."""
        return _key_of(self.server_key)

    def _count_answer(self) -> bytes:
        blinded = [self._blinds[user] * self.counts[user] for user in self._order]
        masked = self._pairs.masked(COUNTS, 0, blinded, self.public.n)
        return pack_numbers(masked, self.settings.count_bytes)

    def _check_server_key(self, server_key: bytes) -> None:
        check_length("server's key", server_key, self.settings.count_bytes)
        most = self.settings.max_records_per_user
        _key_of(server_key).check(self.settings.key_bits, coprime_to=most)

    @cached_property
    def _blinds(self) -> list[mpz]:
        return user_blinds(self.seed, self.settings.users, self.public.n)


def _key_of(modulus: bytes) -> PublicKey:
    return PublicKey(mpz.from_bytes(modulus, "big"))
