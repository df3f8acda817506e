"""The server's side of private weighting over Paillier; the package describes the protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import SystemRandom
from typing import Any

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.fixed_point import from_residue
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key
from flower_ext.secure.weighting.paillier_messages import (
    EncryptedWeights,
    MaskedSum,
    PaillierKey,
    SealedWeights,
    pack_ciphertexts,
    unpack_ciphertexts,
)
from flower_ext.secure.weighting.party import Dialogue, Stage
from flower_ext.secure.weighting.server_party import ServerParty
from flower_ext.secure.weighting.weighting_messages import DrawAnswer, DrawOffer, check_later


class WeightingServer(ServerParty[WeightingSettings, MaskedSum]):
    """The party with the secret key: it relays messages, inverts blinded totals, decrypts sums.

    After the set-up of `ServerParty`, call `open_round` and `close_round` for every round. If the
    settings have ``draw_choices``, open a round with `offer_draw` and `open_drawn_round` instead.

    Parameters
    ----------
    key : PrivateKey, optional
        By default a fresh key of ``settings.key_bits`` bits.
    settings, **options
        As for `ServerParty`.
    """

    sum_type = MaskedSum

    def __init__(
        self, settings: WeightingSettings, *, key: PrivateKey | None = None, **options: Any
    ) -> None:
        super().__init__(settings, **options)
        self._key = key or generate_key(
            settings.key_bits, allow_insecure_key_size=settings.allow_insecure_key_size
        )
        self._key.public.check(settings.key_bits, coprime_to=settings.max_records_per_user)
        self._inverses: list[mpz] = []
        self._weights_of_all: bytes | None = None

    @property
    def public_key(self) -> PaillierKey:
        """Paillier modulus, for all silos."""
        return PaillierKey.of(self._key.public, self.settings)

    def begin_round(self, number: int, places: Collection[int] | None) -> Dialogue[bytes]:
        """Encrypt the weights of the round's users, whom the settings may have the silos draw."""
        if self.settings.draw_choices is None:
            return self.open_round(number, sampled=places).to_bytes()
        answer = yield from self._ask_draw(self.offer_draw(number))
        return self.open_drawn_round(answer).to_bytes()

    def open_round(
        self, round_number: int, *, sampled: Collection[int] | None = None
    ) -> EncryptedWeights:
        """Return encryptions of the users' inverse totals, for all silos.

        The server abandons an earlier round that is still open.

        Parameters
        ----------
        round_number : int
            Higher than the number of every earlier round.
        sampled : Collection of int, optional
            Users that take part, as places from 0 to users - 1 in the silos' secret order. The
            other users get an encryption of zero, and all encryptions are fresh. By default all
            users take part, and every round sends the same encryptions.

        Raises
        ------
        ProtocolError
            The counts have not arrived, the round number is not above the last, or the settings
            have ``draw_choices``.
        ValueError
            ``sampled`` holds a place outside the range.
        """
        self._check_round(round_number)
        self._refuse_secret_draw()
        drawn = self._drawn_places(sampled)
        self._last_round = self._open_round = round_number
        if sampled is None and self._weights_of_all is not None:
            return EncryptedWeights(round_number=round_number, weights=self._weights_of_all)
        messages = [x if place in drawn else mpz(0) for place, x in enumerate(self._inverses)]
        encrypted = self._encrypt(messages)
        weights = pack_ciphertexts(encrypted, self.settings)
        if sampled is None:
            self._weights_of_all = weights
        return EncryptedWeights(round_number=round_number, weights=weights)

    def offer_draw(self, round_number: int) -> DrawOffer:
        """Begin a round with a secret draw of users. Send the offer to the silo that answers.

        Raises
        ------
        ProtocolError
            The counts have not arrived, the round number is not above the last, or the settings
            have no ``draw_choices``.
        """
        self._check_round(round_number)
        self._expect_secret_draw()
        return self._offer_draw(round_number)

    def open_drawn_round(self, message: DrawAnswer) -> SealedWeights:
        """Return P sealed fresh encryptions per user: k of its inverse total, the others of zero.

        Only the server knows their order, and only the silos know which one they open. No party
        therefore learns whether the opened one is among the k.

        Raises
        ------
        ProtocolError
            The last `offer_draw` was for another round, or this round was opened before.
        ValueError
            The answer is malformed.
        """
        sender = self._sender_for(message)
        self._check_round(message.number)
        choices = self.settings.draw_choices or 1
        self._last_round = self._open_round = message.number
        messages = [mpz(0)] * (self.settings.users * choices)
        for user, inverse in enumerate(self._inverses):
            for place in SystemRandom().sample(range(choices), self.settings.winning_choices):
                messages[user * choices + place] = inverse
        encrypted = self._encrypt(messages)
        texts = [pack_ciphertexts([ciphertext], self.settings) for ciphertext in encrypted]
        of_users = [texts[at : at + choices] for at in range(0, len(texts), choices)]
        sealed = sender.seal(message.answer, of_users, workers=self._workers)
        joined = b"".join(text for of_user in sealed for text in of_user)
        return SealedWeights(round_number=message.number, public=sender.public, sealed=joined)

    def close_round(self, messages: Sequence[MaskedSum]) -> NDArray[np.float64]:
        """Return the weighted, noised sum over all silos, of shape (coordinates,).

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; the round stays open.
        ProtocolError
            No round is open, or a message belongs to another round.
        ValueError
            A message is malformed, comes from a silo that the run does not have, or was sent twice.
        OverflowError
            The sum is out of bounds, because some user has more than ``max_records_per_user``
            records or a total that is not allowed. Such a total makes the sum about uniform modulo
            n. It goes unnoticed with probability 2 · ``sum_bound`` / n, or 2⁻⁶⁴ with packing. A
            server that tries totals on such a sum may find the user's total; set
            ``silo_record_limits`` to rule this out.
        """
        self._check_sums(messages)
        settings, public = self.settings, self._key.public
        totals = [mpz(1)] * settings.ciphertexts
        for message in messages:
            for at, ciphertext in enumerate(
                unpack_ciphertexts(message.ciphertexts, settings, public)
            ):
                totals[at] = totals[at] * ciphertext % public.n_squared
        self._open_round = None
        progress = self._watch("decryption")
        decrypted = self._key.decrypt(totals, workers=self._workers, progress=progress)
        plaintexts = [from_residue(plaintext, public.n) for plaintext in decrypted]
        try:
            coordinates = settings.packing.unpack(plaintexts, settings.coordinates)
        except OverflowError as error:
            allowed = f", and one of {settings.allowed_totals}" if settings.allowed_totals else ""
            raise OverflowError(
                "the sum is out of bounds: expected at most "
                f"max_records_per_user={settings.max_records_per_user} records for every user"
                f"{allowed}"
            ) from error
        return settings.encoding.decode(coordinates, scale=settings.common_multiple)

    def check_sum(self, message: MaskedSum) -> None:
        """Check one silo's sum as soon as it arrives, its ciphertexts too."""
        super().check_sum(message)
        unpack_ciphertexts(message.ciphertexts, self.settings, self._key.public)

    @property
    def _count_modulus(self) -> int:
        return int(self._key.public.n)

    def _encrypt(self, messages: list[mpz]) -> list[mpz]:
        progress = self._watch(f"round {self._open_round}: encryptions")
        return self._key.encrypt(messages, workers=self._workers, progress=progress)

    def _take_totals(self, totals: list[int]) -> None:
        n = self._key.public.n
        if not any(totals):
            raise InvalidValue("counts: expected at least one user with a record")
        try:
            # A user without records contributes zero under every weight.
            self._inverses = [gmpy2.invert(mpz(t), n) if t else mpz(0) for t in totals]
        except ZeroDivisionError as error:
            raise InvalidValue("counts: expected totals that share no factor with n") from error

    def _check_round(self, round_number: int) -> None:
        self._expect(Stage.COUNTED)
        check_later("round", round_number, self._last_round)

    def _check_sum_of_round(self, message: MaskedSum) -> None:
        if message.round_number != self._open_round:
            raise ProtocolError(
                f"sum of round {message.round_number}: expected round {self._open_round}"
            )
