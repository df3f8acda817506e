"""The server's side of private weighting; `flower_ext.secure.weighting` describes the protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import SystemRandom

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.fixed_point import from_residue
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.messages import (
    BlindedCounts,
    DrawAnswer,
    DrawOffer,
    EncryptedWeights,
    MaskedSum,
    SealedSeed,
    SealedWeights,
    SiloKey,
    check_all_there,
    check_keys,
    check_later,
    check_senders,
    ciphertexts_from,
    from_bytes,
    to_bytes,
)
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key


class WeightingServer:
    """The party with the secret key: it relays messages, inverts blinded totals, decrypts sums.

    Call `public_key`, `relay_keys`, `relay_seed`, `receive_counts` once, in this order, then
    `open_round` and `close_round` for every round. If the settings have ``draw_choices``, open a
    round with `offer_draw` and `open_drawn_round` instead.

    Parameters
    ----------
    settings : WeightingSettings
    key : PrivateKey, optional
        By default a fresh key of ``settings.key_bits`` bits.
    workers : int
        Number of threads.
    """

    def __init__(
        self, settings: WeightingSettings, *, key: PrivateKey | None = None, workers: int = 1
    ) -> None:
        self.settings = settings
        self._key = key or generate_key(
            settings.key_bits, allow_insecure_key_size=settings.allow_insecure_key_size
        )
        self._key.public.check(settings.key_bits, coprime_to=settings.max_records_per_user)
        self._workers = workers
        self._keys_relayed = self._seed_relayed = False
        self._inverses: list[mpz] | None = None
        self._weights_of_all: bytes | None = None
        self._last_round = 0
        self._open_round: int | None = None
        self._drawing: tuple[int, Sender] | None = None

    def __repr__(self) -> str:
        return f"WeightingServer(run={self.settings.run!r}, last_round={self._last_round})"

    @property
    def public_key(self) -> bytes:
        """Paillier modulus, for all silos."""
        return to_bytes([self._key.public.n], self.settings.residue_bytes)

    def relay_keys(self, keys: Sequence[SiloKey]) -> tuple[SiloKey, ...]:
        """Return the silos' public keys, for all silos.

        Raises
        ------
        ProtocolError
            The keys were relayed before.
        ValueError
            There is not exactly one key from each silo, or a key is malformed or of low order.
        """
        if self._keys_relayed:
            raise ProtocolError("public keys were relayed before: expected relay_keys to run once")
        check_senders([key.silo for key in keys], range(self.settings.silos))
        check_keys({key.silo: key.public for key in keys})
        self._keys_relayed = True
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
        if not self._keys_relayed or self._seed_relayed:
            raise ProtocolError("the seed is relayed once, after the public keys")
        check_senders([seed.receiver for seed in seeds], range(1, self.settings.silos))
        self._seed_relayed = True
        return tuple(sorted(seeds, key=lambda seed: seed.receiver))

    def receive_counts(self, messages: Sequence[BlindedCounts]) -> None:
        """Sum the blinded counts of all silos and invert the totals.

        Raises
        ------
        ProtocolError
            The seed was not relayed yet, or counts were received before.
        IncompleteRound
            A silo's counts are missing.
        ValueError
            A message is malformed, comes from a silo that the run does not have, or was sent twice;
            or no user has a record.
        """
        if not self._seed_relayed or self._inverses is not None:
            raise ProtocolError("counts are received once, after the seed was relayed")
        check_all_there([message.silo for message in messages], self.settings.silos)
        n = self._key.public.n
        totals = [mpz(0)] * self.settings.users
        for message in messages:
            counts = from_bytes(
                message.counts, self.settings.residue_bytes, self.settings.users, name="counts"
            )
            if any(count >= n for count in counts):
                raise InvalidValue(f"counts of silo {message.silo}: expected numbers below n")
            totals = [(t + count) % n for t, count in zip(totals, counts, strict=True)]
        if not any(totals):
            raise InvalidValue("counts: expected at least one user with a record")
        try:
            # A user without records contributes zero under every weight.
            self._inverses = [gmpy2.invert(total, n) if total else mpz(0) for total in totals]
        except ZeroDivisionError as error:
            raise InvalidValue("counts: expected totals that share no factor with n") from error

    def open_round(
        self,
        round_number: int,
        *,
        sampled: Collection[int] | None = None,
        progress: Progress | None = None,
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
        inverses = self._ready_for(round_number)
        if self.settings.draw_choices is not None:
            raise ProtocolError(
                "open_round under settings with draw_choices: call offer_draw and "
                "open_drawn_round instead"
            )
        everyone = range(self.settings.users)
        drawn = set(everyone if sampled is None else sampled)
        if not drawn <= set(everyone):
            raise InvalidValue(f"sampled: expected integers from 0 to {self.settings.users - 1}")
        self._last_round = self._open_round = round_number
        if sampled is None and self._weights_of_all is not None:
            return EncryptedWeights(round_number=round_number, weights=self._weights_of_all)
        messages = [x if place in drawn else mpz(0) for place, x in enumerate(inverses)]
        encrypted = self._key.encrypt(messages, workers=self._workers, progress=progress)
        weights = to_bytes(encrypted, self.settings.ciphertext_bytes)
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
        self._ready_for(round_number)
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "offer_draw: the settings have no draw_choices; call open_round instead"
            )
        sender = Sender(self.settings.context)
        self._drawing = round_number, sender
        return DrawOffer(round_number=round_number, public=sender.public)

    def open_drawn_round(
        self, message: DrawAnswer, *, progress: Progress | None = None
    ) -> SealedWeights:
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
        if self._drawing is None or self._drawing[0] != message.round_number:
            raise ProtocolError(
                f"draw of round {message.round_number}: expected offer_draw for this round first"
            )
        (number, sender), self._drawing = self._drawing, None
        inverses, choices = self._ready_for(number), self.settings.draw_choices or 1
        self._last_round = self._open_round = number
        messages = [mpz(0)] * (self.settings.users * choices)
        for user, inverse in enumerate(inverses):
            for place in SystemRandom().sample(range(choices), self.settings.draw_hits):
                messages[user * choices + place] = inverse
        encrypted = self._key.encrypt(messages, workers=self._workers, progress=progress)
        texts = [to_bytes([one], self.settings.ciphertext_bytes) for one in encrypted]
        of_users = [texts[at : at + choices] for at in range(0, len(texts), choices)]
        sealed = sender.seal(message.answer, of_users, workers=self._workers)
        joined = b"".join(text for of_user in sealed for text in of_user)
        return SealedWeights(round_number=number, public=sender.public, sealed=joined)

    def close_round(
        self, messages: Sequence[MaskedSum], *, progress: Progress | None = None
    ) -> NDArray[np.float64]:
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
        for message in messages:
            self._check_round(message)
        if self._open_round is None:
            raise ProtocolError("no round is open: open one and send its weights to the silos")
        check_all_there([message.silo for message in messages], self.settings.silos)
        public = self._key.public
        totals = [mpz(1)] * self.settings.ciphertexts
        for message in messages:
            for at, ciphertext in enumerate(
                ciphertexts_from(message.ciphertexts, self.settings, public)
            ):
                totals[at] = totals[at] * ciphertext % public.n_squared
        self._open_round = None
        decrypted = self._key.decrypt(totals, workers=self._workers, progress=progress)
        plaintexts = [from_residue(message, public.n) for message in decrypted]
        try:
            coordinates = self.settings.packing.unpack(plaintexts, self.settings.coordinates)
        except OverflowError as error:
            raise OverflowError(
                "the sum is out of bounds: expected at most "
                f"max_records_per_user={self.settings.max_records_per_user} records for every user"
                + (
                    f", and one of {self.settings.allowed_totals}"
                    if self.settings.allowed_totals
                    else ""
                )
            ) from error
        return self.settings.encoding.decode(coordinates, scale=self.settings.common_multiple)

    def check_sum(self, message: MaskedSum) -> None:
        """Check one silo's sum as soon as it arrives, before the other silos have answered.

        Raises
        ------
        ProtocolError
            No round is open, or the message belongs to another round.
        ValueError
            The length is wrong, or a number is not a ciphertext.
        """
        self._check_round(message)
        ciphertexts_from(message.ciphertexts, self.settings, self._key.public)

    def _ready_for(self, round_number: int) -> list[mpz]:
        if self._inverses is None:
            raise ProtocolError("a round needs the counts of all silos: call receive_counts first")
        check_later(round_number, self._last_round)
        return self._inverses

    def _check_round(self, message: MaskedSum) -> None:
        if self._open_round is None:
            raise ProtocolError("no round is open: open one and send its weights to the silos")
        if message.round_number != self._open_round:
            raise ProtocolError(
                f"sum of round {message.round_number}: expected round {self._open_round}"
            )
