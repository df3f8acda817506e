"""The server's side of private weighting; the protocol is in `flower_ext.secure`."""

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
    check_later,
    check_senders,
    ciphertexts_from,
    from_bytes,
    to_bytes,
)
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key


class WeightingServer:
    """The party that relays, inverts blinded totals, and decrypts the sum. It holds the secret key.

    Call `public_key`, `relay_keys`, `relay_seed`, `receive_counts` once, in this order, then
    `open_round` and `close_round` for every round. Where the settings draw users whom nobody knows,
    a round opens with `offer_draw` and `open_drawn_round`.

    Parameters
    ----------
    settings : WeightingSettings
    key : PrivateKey, optional
        Fresh by default, of ``settings.key_bits`` bits.
    workers : int
        Threads.
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
        """The Paillier modulus, for all silos."""
        return to_bytes([self._key.public.n], self.settings.residue_bytes)

    def relay_keys(self, keys: Sequence[SiloKey]) -> tuple[SiloKey, ...]:
        """Silos' public keys, for all silos.

        Raises
        ------
        ProtocolError
            Relayed before.
        ValueError
            Not one key from each silo.
        """
        if self._keys_relayed:
            raise ProtocolError("public keys were relayed before")
        check_senders([key.silo for key in keys], range(self.settings.silos))
        self._keys_relayed = True
        return tuple(sorted(keys, key=lambda key: key.silo))

    def relay_seed(self, seeds: Sequence[SealedSeed]) -> tuple[SealedSeed, ...]:
        """Silo 0's sealed seeds, each for its receiver.

        Raises
        ------
        ProtocolError
            Before the public keys, or a second time.
        ValueError
            Not one seed for each silo but silo 0.
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
            Before the seed, or a second time.
        IncompleteRound
            A silo's counts are missing.
        ValueError
            Malformed, from no silo of this run, or sent twice.
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
        # A user without records adds zero whatever the weight.
        self._inverses = [gmpy2.invert(total, n) if total else mpz(0) for total in totals]

    def open_round(
        self,
        round_number: int,
        *,
        sampled: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> EncryptedWeights:
        """Encryptions of the users' inverse totals, for all silos.

        An earlier round that is still open is given up.

        Parameters
        ----------
        round_number : int
            Above that of every earlier round.
        sampled : Collection of int, optional
            Who takes part, as places from 0 to users - 1 in the silos' secret order. The others
            get an encryption of zero, and all encryptions are fresh. By default all take part, and
            every round sends the same encryptions.

        Raises
        ------
        ProtocolError
            Before the counts, the round is not above the last, or the settings have users drawn by
            `open_drawn_round`.
        ValueError
            ``sampled`` names no user.
        """
        inverses = self._ready_for(round_number)
        if self.settings.draw_choices is not None:
            raise ProtocolError("open_round: the settings' draw_choices ask for open_drawn_round")
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
        """Begin a round whose users nobody will know; for the silo that answers.

        Raises
        ------
        ProtocolError
            As `open_round`, or the settings have no ``draw_choices``.
        """
        self._ready_for(round_number)
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "offer_draw: the settings have no draw_choices; open_round draws users"
            )
        sender = Sender()
        self._drawing = round_number, sender
        return DrawOffer(round_number=round_number, public=sender.public)

    def open_drawn_round(
        self, message: DrawAnswer, *, progress: Progress | None = None
    ) -> SealedWeights:
        """P fresh encryptions for each user, k of its inverse total and the others of zero.

        They lie in an order that only the server knows; the silos open the one of their choice, so
        that neither knows whether it is one of the k.

        Raises
        ------
        ProtocolError
            The round was not offered last, or opened before.
        ValueError
            The answer is malformed.
        """
        if self._drawing is None or self._drawing[0] != message.round_number:
            raise ProtocolError(f"draw of round {message.round_number}: expected an offer before")
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
        """The weighted, noised sum over all silos.

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; the round stays open.
        ProtocolError
            No round is open, or a message is of another round.
        ValueError
            Malformed, from no silo of this run, or sent twice.
        OverflowError
            The sum is out of bounds: some user has more than ``max_records_per_user`` records, or
            a number of them that is not allowed. Such a total makes the sum about uniform modulo
            n, so it goes unseen only by chance: 2 · ``sum_bound`` / n, or 2⁻⁶⁴ with packing. A
            server that tries totals on such a sum may find the user's. ``silo_record_limits`` rule
            it out.
        """
        for message in messages:
            self._check_round(message)
        if self._open_round is None:
            raise ProtocolError("no round is open")
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
        """Refuse a silo's sum by itself, before others are there.

        Raises
        ------
        ProtocolError
            No round is open, or the message is of another round.
        ValueError
            Malformed: a wrong length, or something that is no ciphertext.
        """
        self._check_round(message)
        ciphertexts_from(message.ciphertexts, self.settings, self._key.public)

    def _ready_for(self, round_number: int) -> list[mpz]:
        if self._inverses is None:
            raise ProtocolError("a round opens after the counts of all silos arrived")
        check_later(round_number, self._last_round)
        return self._inverses

    def _check_round(self, message: MaskedSum) -> None:
        if self._open_round is None:
            raise ProtocolError("no round is open")
        if message.round_number != self._open_round:
            raise ProtocolError(
                f"sum of round {message.round_number}: expected round {self._open_round}"
            )
