"""The server in private weighting over Paillier; `secure.weighting` describes the protocol."""

from collections.abc import Collection, Mapping, Sequence
from random import SystemRandom

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.messages import pack_numbers
from flower_ext.secure.weighting.encoding import from_residue
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSettings,
    PaillierSum,
    PaillierWeights,
)
from flower_ext.secure.weighting.server_party import ServerParty


class PaillierServer(ServerParty[PaillierSettings, PaillierSum]):
    """The party with the secret key: it relays messages, inverts blinded totals, decrypts sums."""

    sum_type = PaillierSum

    def __init__(self, settings: PaillierSettings, *, key: PrivateKey | None = None) -> None:
        super().__init__(settings)
        self._key = key or generate_key(
            settings.key_bits, allow_insecure_key_size=settings.allow_insecure_key_size
        )
        self._key.public.check(settings.key_bits, coprime_to=settings.max_records_per_user)
        self._inverses: list[mpz] = []

    @property
    def public_key(self) -> bytes:
        """The Paillier modulus, for all silos."""
        return pack_numbers([self._key.public.n], self.settings.count_bytes)

    def _decrypted(self, messages: Sequence[PaillierSum]) -> NDArray[np.float64]:
        """Return the sum over all silos: see `ServerParty`.

        If a user's total is not allowed, the sum is about uniform modulo n. The server fails to
        notice this with probability 2 · ``sum_bound`` / n, or 2⁻⁶⁴ if a ciphertext holds several
        coordinates. See also `PrivateWeighting.assumed_totals`.
        """
        settings, public = self.settings, self._key.public
        # The product of all silos' ciphertexts encrypts the sum; their masks multiply to one.
        totals = [mpz(1)] * settings.ciphertexts
        for message in messages:
            ciphertexts = public.unpack(message.ciphertexts, settings.ciphertext_bytes)
            for at, ciphertext in enumerate(ciphertexts):
                totals[at] = totals[at] * ciphertext % public.n_squared
        decrypted = self._key.decrypt(totals, name="decryption")
        plaintexts = [from_residue(plaintext, public.n) for plaintext in decrypted]
        try:
            coordinates = settings.packing.unpack(plaintexts, settings.coordinates)
        except OverflowError as error:
            allowed = f" and one of {settings.allowed_totals}" if settings.allowed_totals else ""
            raise OverflowError(
                "the sum is out of bounds: expected every user's number of records to be at most "
                f"max_records_per_user={settings.max_records_per_user}{allowed}"
            ) from error
        return settings.encoding.decode(coordinates, scale=settings.common_multiple)

    def _check_sum(self, message: PaillierSum) -> None:
        self._key.public.unpack(message.ciphertexts, self.settings.ciphertext_bytes)

    def _open_weights(self, number: int, places: Collection[int] | None) -> PaillierWeights:
        """Return a fresh encryption for each user: see `ServerParty`.

        For a user that takes part, the plaintext is the inverse modulo n of the user's blinded
        total; for any other user it is zero.
        """
        drawn = set(range(self.settings.users) if places is None else places)
        inverses = [x if at in drawn else mpz(0) for at, x in enumerate(self._inverses)]
        encrypted = self._key.encrypt(inverses, name=f"round {number}: encryptions")
        weights = pack_numbers(encrypted, self.settings.ciphertext_bytes)
        return PaillierWeights(round_number=number, offer=b"", weights=weights)

    def _sealed_weights(self, number: int, sender: Sender, choices: bytes) -> PaillierWeights:
        """Return ``draw_choices`` encryptions for each user, sealed for an oblivious transfer.

        ``winning_choices`` of them encrypt the user's inverse total, and the others encrypt zero.
        Only the server knows the order of the encryptions, and only the silos know which one they
        open. No party therefore learns whether the silos open an encryption of zero.
        """
        settings, size = self.settings, self.settings.draw_choices or 1
        messages = [mpz(0)] * (settings.users * size)
        for user, inverse in enumerate(self._inverses):
            for place in SystemRandom().sample(range(size), settings.winning_choices):
                messages[user * size + place] = inverse
        encrypted = self._key.encrypt(messages, name=f"round {number}: encryptions")
        texts = [pack_numbers([text], settings.ciphertext_bytes) for text in encrypted]
        of_users = [texts[at : at + size] for at in range(0, len(texts), size)]
        sealed = sender.seal(choices, of_users)
        return PaillierWeights(round_number=number, offer=sender.public, weights=sealed)

    def _take_counts(self, counts: Mapping[int, bytes]) -> None:
        n = self._key.public.n
        totals = self._totals(counts, int(n))
        if not any(totals):
            raise InvalidValue("counts: expected at least one user with a record")
        try:
            # A user without records contributes zero under every weight.
            self._inverses = [gmpy2.invert(mpz(t), n) if t else mpz(0) for t in totals]
        except ZeroDivisionError as error:
            raise InvalidValue(
                "counts of the silos: a user's blinded total has a common factor with the Paillier "
                "modulus, so that it has no inverse; a silo sent wrong counts"
            ) from error
