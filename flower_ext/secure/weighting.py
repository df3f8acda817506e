"""Σ_s Σ_u (n_su / N_u) Δ_su + z_s, without anyone learning how many records a user has where.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024), for honest-but-curious parties that do
not collude.

====================  =====================================================================
paper                 here
====================  =====================================================================
n_su, N_u, N_max      ``counts``, their sum over silos, ``max_records_per_user``
C_LCM                 `WeightingPlan.common_multiple`
R, r_u                the silos' seed; `user_blinds`
Δ̃^{s,u}, z_s          ``updates``, ``noise``
P                     `WeightingPlan.precision`, of the whole sum
====================  =====================================================================

Where this departs from the paper:

* Silos number the users in an order that the server does not know.
* A silo's sum is masked by units modulo n² that multiply to one over the silos, instead of by
  numbers modulo n that add to zero. One such mask hides message *and* randomness of a ciphertext,
  so a single upload is uniform.
* When no users are drawn, every round sends the same encryptions, and silos keep what they computed
  from them. When users are drawn, they are fresh.
* The product of all uploads is a ciphertext whose randomness the server could otherwise predict for
  any guess of the updates, having made the encryptions. So each ciphertext is re-randomised, each
  by one silo, in turn.
* A silo adds a dither to its noise: uniform over one step of the encoding. The paper's noise is a
  multiple of C_LCM, so the decrypted sum modulo C_LCM would be that of the updates alone, and its
  greatest common divisor with C_LCM would show factors of the N_u. With the dither it is uniform.

What the server learns: the noisy sum; how many users have no record at all (their blinded total is
zero), but not which; and, when it draws users, which places of the secret order it drew. What a
silo learns: nothing about other silos. A silo spends its time on the users that it has; who times
it learns about how many these are.
"""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.secure.blinds import user_blinds, user_order
from flower_ext.secure.errors import IncompleteRound, ProtocolError
from flower_ext.secure.fixed_point import from_residue
from flower_ext.secure.masks import PairKeys
from flower_ext.secure.messages import (
    BlindedCounts,
    EncryptedWeights,
    MaskedSum,
    SealedSeed,
    SiloKey,
    from_bytes,
    to_bytes,
)
from flower_ext.secure.multiexp import FixedBaseProducts
from flower_ext.secure.paillier import PrivateKey, PublicKey, ZeroPool, generate_key
from flower_ext.secure.plan import WeightingPlan
from flower_ext.secure.threads import Progress, map_slices

_SEED = "seed"
_COUNTS = "counts"
_SUM = "sum"
_SEEDING_SILO = 0


class WeightingServer:
    """The party that relays, inverts blinded totals, and decrypts the sum. It holds the secret key.

    Call `public_key`, `relay_keys`, `relay_seed`, `receive_counts` once, in this order, then
    `open_round` and `close_round` for every round.

    Parameters
    ----------
    plan : WeightingPlan
    key : PrivateKey, optional
        Fresh by default, of ``plan.key_bits`` bits.
    workers : int
        Threads.
    """

    def __init__(
        self, plan: WeightingPlan, *, key: PrivateKey | None = None, workers: int = 1
    ) -> None:
        self.plan = plan
        self._key = key or generate_key(
            plan.key_bits, allow_insecure_key_size=plan.allow_insecure_key_size
        )
        self._key.public.check(plan.key_bits)
        self._workers = workers
        self._keys_relayed = self._seed_relayed = False
        self._inverses: list[mpz] | None = None
        self._weights_of_all: bytes | None = None
        self._last_round = 0
        self._open_round: int | None = None

    def __repr__(self) -> str:
        return f"WeightingServer(run={self.plan.run!r}, last_round={self._last_round})"

    @property
    def public_key(self) -> bytes:
        """The Paillier modulus, for all silos."""
        return to_bytes([self._key.public.n], self.plan.residue_bytes)

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
        _check_senders([key.silo for key in keys], range(self.plan.silos))
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
        _check_senders([seed.receiver for seed in seeds], range(1, self.plan.silos))
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
        _check_all_there([message.silo for message in messages], self.plan.silos)
        n = self._key.public.n
        totals = [mpz(0)] * self.plan.users
        for message in messages:
            counts = from_bytes(
                message.counts, self.plan.residue_bytes, self.plan.users, name="counts"
            )
            if any(count >= n for count in counts):
                raise ValueError(f"counts of silo {message.silo}: expected numbers below n")
            totals = [(t + count) % n for t, count in zip(totals, counts, strict=True)]
        if not any(totals):
            raise ValueError("counts: expected at least one user with a record")
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
            Before the counts, or the round is not above the last.
        ValueError
            ``sampled`` names no user.
        """
        if self._inverses is None:
            raise ProtocolError("a round opens after the counts of all silos arrived")
        _check_later(round_number, self._last_round)
        everyone = range(self.plan.users)
        drawn = set(everyone if sampled is None else sampled)
        if not drawn <= set(everyone):
            raise ValueError(f"sampled: expected integers from 0 to {self.plan.users - 1}")
        self._last_round = self._open_round = round_number
        if sampled is None and self._weights_of_all is not None:
            return EncryptedWeights(round_number=round_number, weights=self._weights_of_all)
        messages = [x if place in drawn else mpz(0) for place, x in enumerate(self._inverses)]
        encrypted = self._key.encrypt(messages, workers=self._workers, progress=progress)
        weights = to_bytes(encrypted, self.plan.ciphertext_bytes)
        if sampled is None:
            self._weights_of_all = weights
        return EncryptedWeights(round_number=round_number, weights=weights)

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
        _check_all_there([message.silo for message in messages], self.plan.silos)
        public = self._key.public
        totals = [mpz(1)] * self.plan.ciphertexts
        for message in messages:
            for at, ciphertext in enumerate(_ciphertexts(message.ciphertexts, self.plan, public)):
                totals[at] = totals[at] * ciphertext % public.n_squared
        self._open_round = None
        decrypted = self._key.decrypt(totals, workers=self._workers, progress=progress)
        plaintexts = [from_residue(message, public.n) for message in decrypted]
        try:
            coordinates = self.plan.packing.unpack(plaintexts, self.plan.coordinates)
        except OverflowError as error:
            raise OverflowError(
                "the sum is out of bounds: expected at most "
                f"max_records_per_user={self.plan.max_records_per_user} records for every user"
                + (f", and one of {self.plan.allowed_totals}" if self.plan.allowed_totals else "")
            ) from error
        return self.plan.encoding.decode(coordinates, scale=self.plan.common_multiple)

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
        _ciphertexts(message.ciphertexts, self.plan, self._key.public)

    def _check_round(self, message: MaskedSum) -> None:
        if self._open_round is None:
            raise ProtocolError("no round is open")
        if message.round_number != self._open_round:
            raise ProtocolError(
                f"sum of round {message.round_number}: expected round {self._open_round}"
            )


class _Stage(Enum):
    NEW = auto()
    KEYED = auto()
    SEEDED = auto()
    COUNTED = auto()


class WeightingSilo:
    """One silo. Everything it holds is secret but what its methods return.

    Call `key`, `receive_keys`, then `seal_seed` (silo 0) or `open_seed` (the others), then
    `blind_counts`, and `weigh` for every round.

    Parameters
    ----------
    plan : WeightingPlan
    index : int
        Its place among the silos, from zero.
    save : callable, optional
        Stores `export_state` durably. It is called before anything leaves that must not leave
        twice, so that a silo that restarts from what was stored never uses a mask again.
    workers : int
        Threads.
    """

    def __init__(
        self,
        plan: WeightingPlan,
        index: int,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        if not 0 <= index < plan.silos:
            raise ValueError(f"index={index!r}: expected an integer from 0 to {plan.silos - 1}")
        self.plan = plan
        self.index = index
        self._save = save
        self._workers = workers
        self._pairs = PairKeys(context=plan.context, index=index)
        self._stage = _Stage.NEW
        self._public: PublicKey | None = None
        self._silo_keys: dict[int, bytes] = {}
        self._seed = b""
        self._blinds: list[mpz] = []
        self._order: list[int] = []
        self._counts: list[int] = []
        self._last_round = 0
        self._zeros: ZeroPool | None = None
        self._weights = b""
        self._powers: FixedBaseProducts | None = None

    def __repr__(self) -> str:
        return f"WeightingSilo(index={self.index}, stage={self._stage.name.lower()})"

    @property
    def key(self) -> SiloKey:
        """Its X25519 public key, for the other silos."""
        return SiloKey(silo=self.index, public=self._pairs.public)

    @property
    def fingerprint(self) -> str:
        """Equal at all silos, unless the server swapped keys on the way."""
        return self._pairs.fingerprint

    def receive_keys(self, server_key: bytes, silo_keys: Sequence[SiloKey]) -> None:
        """Take the server's Paillier modulus and all silos' public keys.

        Raises
        ------
        ProtocolError
            A second time.
        ValueError
            A key is missing or unfit.
        """
        self._expect(_Stage.NEW)
        (n,) = from_bytes(server_key, self.plan.residue_bytes, 1, name="public key")
        public = PublicKey(n)
        public.check(self.plan.key_bits)
        _check_senders([key.silo for key in silo_keys], range(self.plan.silos))
        keys = {key.silo: key.public for key in silo_keys}
        self._pairs.agree(keys)
        self._public, self._silo_keys = public, keys
        self._stage = _Stage.KEYED

    def seal_seed(self) -> list[SealedSeed]:
        """Draw the silos' seed and seal it for every other silo. Silo 0 only.

        Raises
        ------
        ProtocolError
            Out of order, or not silo 0.
        """
        self._expect(_Stage.KEYED)
        if self.index != _SEEDING_SILO:
            raise ProtocolError(f"silo {self.index} opens a seed; silo {_SEEDING_SILO} seals it")
        self._set_seed(secrets.token_bytes(32))
        return [
            SealedSeed(receiver=silo, sealed=self._pairs.seal(silo, _SEED, self._seed))
            for silo in range(1, self.plan.silos)
        ]

    def open_seed(self, message: SealedSeed) -> None:
        """Take the silos' seed.

        Raises
        ------
        ProtocolError
            Out of order, or this is silo 0.
        ValueError
            For another silo, or not sealed by silo 0 in this run.
        """
        self._expect(_Stage.KEYED)
        if self.index == _SEEDING_SILO:
            raise ProtocolError(f"silo {_SEEDING_SILO} seals the seed; it opens none")
        if message.receiver != self.index:
            raise ValueError(f"seed for silo {message.receiver}: expected one for {self.index}")
        seed = self._pairs.open(_SEEDING_SILO, _SEED, message.sealed)
        if len(seed) != 32:
            raise ValueError(f"seed of {len(seed)} bytes: expected 32")
        self._set_seed(seed)

    def blind_counts(self, counts: Sequence[int]) -> BlindedCounts:
        """How many records of each user are here, blinded and masked.

        Parameters
        ----------
        counts : Sequence of int
            One a user, in the order of users that all silos share; zero where there is none.

        Raises
        ------
        ProtocolError
            Out of order.
        TypeError
            A count is no integer.
        ValueError
            Wrong length, negative, or above this silo's limit.
        """
        self._expect(_Stage.SEEDED)
        counts = [operator.index(count) for count in counts]
        limit = self.plan.record_limit(self.index)
        if len(counts) != self.plan.users:
            raise ValueError(f"counts of {len(counts)} users: expected {self.plan.users}")
        if not all(0 <= count <= limit for count in counts):
            raise ValueError(f"counts: expected 0 to {limit} records of each user in this silo")
        self._counts = counts
        self._stage = _Stage.COUNTED
        self._store()
        n = self._key.n
        masks = self._pairs.additive_masks(_COUNTS, 0, self.plan.users, n)
        blinded = [
            (self._blinds[user] * counts[user] + mask) % n
            for user, mask in zip(self._order, masks, strict=True)
        ]
        return BlindedCounts(silo=self.index, counts=to_bytes(blinded, self.plan.residue_bytes))

    def prepare(
        self, pool: ZeroPool | None = None, *, progress: Progress | None = None
    ) -> ZeroPool:
        """Set up a `ZeroPool`, so that re-randomising costs an eleventh. Any time after the keys.

        It takes `ZeroPool.size` full exponentiations and pays off after somewhat more ciphertexts
        than that. Silos of one process may share a pool of this server's key.
        """
        if pool is None:
            pool = ZeroPool(self._key, workers=self._workers, progress=progress)
        if pool.public != self._key:
            raise ValueError("pool: expected one of this server's key")
        self._zeros = pool
        return pool

    def weigh(
        self,
        message: EncryptedWeights,
        updates: Mapping[int, ArrayLike],
        noise: ArrayLike,
        *,
        progress: Progress | None = None,
    ) -> MaskedSum:
        """Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Clipped update of every user that has records here, by user; each of shape
            (coordinates,) and within ``plan.update_bound``.
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).
        progress : callable, optional
            Counts coordinates.

        Raises
        ------
        ProtocolError
            Out of order, or the round is not above the last.
        ValueError
            Malformed weights; updates of other users than those with records here; wrong shapes;
            values that are not finite or out of bounds. Nothing has left then, and the round can be
            tried again.
        """
        self._expect(_Stage.COUNTED)
        _check_later(message.round_number, self._last_round)
        plan, public = self.plan, self._key
        users = [user for user, count in enumerate(self._counts) if count]
        exponents = self._encode_updates(updates, users)
        encoded_noise = self._encode("noise", plan.noise_encoding.encode, noise)
        powers = self._powers_of(message.weights, users)
        self._last_round = message.round_number
        self._store()

        products = powers.of(exponents, workers=self._workers, progress=progress)
        noises = plan.packing.pack([self._dithered(int(z)) for z in encoded_noise])
        masks = self._pairs.multiplicative_masks(
            _SUM, message.round_number, plan.ciphertexts, public.n_squared
        )
        own = [
            product * public.plain(noise_) % public.n_squared * mask % public.n_squared
            for product, noise_, mask in zip(self._pack(products), noises, masks, strict=True)
        ]
        self._rerandomise_share(own, message.round_number)
        return MaskedSum(
            round_number=message.round_number,
            silo=self.index,
            ciphertexts=to_bytes(own, plan.ciphertext_bytes),
        )

    def export_state(self) -> bytes:
        """All that a restart needs, at any stage.

        Holds secrets in the clear: store it where others cannot read, and send it nowhere.
        """
        state = {
            "context": self.plan.context.hex(),
            "index": self.index,
            "stage": self._stage.name,
            "private": self._pairs.private.hex(),
            "silo_keys": [key.hex() for _, key in sorted(self._silo_keys.items())],
            "n": hex(self._public.n) if self._public is not None else "",
            "seed": self._seed.hex(),
            "counts": self._counts,
            "last_round": self._last_round,
        }
        return json.dumps(state).encode()

    @classmethod
    def from_state(
        cls,
        plan: WeightingPlan,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> WeightingSilo:
        """A silo as it was exported, at the same stage. Rounds up to its last one stay used.

        Raises
        ------
        ValueError
            Not a state of this plan.
        """
        try:
            facts = json.loads(state)
            if facts["context"] != plan.context.hex():
                raise ValueError("state: expected one that was exported under the same plan")
            silo = cls(plan, facts["index"], workers=workers)
            silo._pairs = PairKeys(
                context=plan.context, index=silo.index, private=bytes.fromhex(facts["private"])
            )
            stage = _Stage[facts["stage"]]
            if stage is not _Stage.NEW:
                silo._silo_keys = {
                    index: bytes.fromhex(key) for index, key in enumerate(facts["silo_keys"])
                }
                silo._pairs.agree(silo._silo_keys)
                silo._public = PublicKey(mpz(facts["n"], 16))
            if stage in (_Stage.SEEDED, _Stage.COUNTED):
                silo._set_seed(bytes.fromhex(facts["seed"]))
            silo._counts = list(facts["counts"])
            silo._last_round = int(facts["last_round"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError("state: expected bytes from export_state") from error
        silo._stage = stage
        silo._save = save
        return silo

    def adopt(self, earlier: WeightingSilo) -> None:
        """Take over the tables and the pool of this very silo, as it was earlier in this process.

        They spare work and decide nothing: a silo without them sends the same.

        Raises
        ------
        ValueError
            Another silo, or one that holds other records.
        """
        for name in ("index", "_seed", "_counts", "_public"):
            if getattr(self, name) != getattr(earlier, name):
                raise ValueError("earlier: expected this silo with the same seed and counts")
        self._weights, self._powers = earlier._weights, earlier._powers
        self._zeros = earlier._zeros

    @property
    def prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._zeros is not None

    @property
    def _key(self) -> PublicKey:
        if self._public is None:
            raise ProtocolError("the server's public key has not arrived")
        return self._public

    def _expect(self, stage: _Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError(
                f"silo {self.index} is {self._stage.name.lower()}: "
                f"expected it to be {stage.name.lower()}"
            )

    def _store(self) -> None:
        if self._save is not None:
            self._save(self.export_state())

    def _set_seed(self, seed: bytes) -> None:
        self._seed = seed
        self._blinds = user_blinds(seed, self.plan.users, self._key.n)
        self._order = user_order(seed, self.plan.users)
        self._stage = _Stage.SEEDED

    def _encode(
        self, name: str, encode: Callable[..., NDArray[np.int64]], values: ArrayLike
    ) -> NDArray[np.int64]:
        encoded = encode(values, name=name)
        if encoded.shape != (self.plan.coordinates,):
            raise ValueError(
                f"{name} of shape {encoded.shape}: expected ({self.plan.coordinates},)"
            )
        return encoded

    def _encode_updates(
        self, updates: Mapping[int, ArrayLike], users: Sequence[int]
    ) -> NDArray[np.int64]:
        if set(updates) != set(users):
            wrong = sorted(set(updates) ^ set(users))
            raise ValueError(
                f"updates of users {wrong[:10]}: expected one of every user with records here, "
                "and of no other"
            )
        encoded = np.zeros((len(users), self.plan.coordinates), dtype=np.int64)
        for row, user in enumerate(users):
            encoded[row] = self._encode("updates", self.plan.encoding.encode, updates[user])
        return encoded

    def _powers_of(self, data: bytes, users: Sequence[int]) -> FixedBaseProducts:
        """Encrypted n_su · C_LCM / N_u of every user here, ready to be raised to encoded updates.

        Everything of a user that is the same for all coordinates goes in here: one full
        exponentiation a user instead of one a user and coordinate.
        """
        if self._powers is not None and data == self._weights:
            return self._powers
        plan, public = self.plan, self._key
        weights = _ciphertexts(data, plan, public, count=plan.users)
        place = {user: at for at, user in enumerate(self._order)}

        def fold(slice_: Sequence[int]) -> list[mpz]:
            folded = []
            for user in slice_:
                factor = self._counts[user] * self._blinds[user] * plan.common_multiple % public.n
                folded.append(gmpy2.powmod(weights[place[user]], factor, public.n_squared))
            return folded

        self._powers = FixedBaseProducts(
            map_slices(fold, users, workers=self._workers),
            public.n_squared,
            lowest=-plan.encoding.largest,
            highest=plan.encoding.largest,
            expected_products=plan.coordinates,
            table_memory_limit=plan.table_memory_limit,
            workers=self._workers,
        )
        self._weights = data
        return self._powers

    def _dithered(self, encoded: int) -> int:
        """Encoded noise times C_LCM, moved by less than half a step, uniformly."""
        multiple = self.plan.common_multiple
        return encoded * multiple + secrets.randbelow(multiple) - multiple // 2

    def _pack(self, products: Sequence[mpz]) -> list[mpz]:
        """Ciphertexts of packed plaintexts from ciphertexts of single coordinates."""
        packing, n_squared = self.plan.packing, self._key.n_squared
        shift = mpz(1) << packing.slot_bits

        def join(starts: Sequence[int]) -> list[mpz]:
            joined = []
            for start in starts:
                *rest, total = products[start : start + packing.slots]
                for product in reversed(rest):
                    total = gmpy2.powmod(total, shift, n_squared) * product % n_squared
                joined.append(total)
            return joined

        return map_slices(join, range(0, len(products), packing.slots), workers=self._workers)

    def _rerandomise_share(self, ciphertexts: list[mpz], round_number: int) -> None:
        """Re-randomise, in place, the ciphertexts that are this silo's turn in this round."""
        first = (self.index - round_number) % self.plan.silos
        share = range(first, len(ciphertexts), self.plan.silos)
        if self._zeros is None:
            public = self._key

            def draw(slice_: Sequence[int]) -> list[mpz]:
                return [public.encrypt_zero() for _ in slice_]

            zeros = map_slices(draw, share, workers=self._workers)
        else:
            zeros = self._zeros.take(len(share), workers=self._workers)
        for at, zero in zip(share, zeros, strict=True):
            ciphertexts[at] = ciphertexts[at] * zero % self._key.n_squared


def _ciphertexts(
    data: bytes, plan: WeightingPlan, public: PublicKey, *, count: int | None = None
) -> list[mpz]:
    expected = plan.ciphertexts if count is None else count
    ciphertexts = from_bytes(data, plan.ciphertext_bytes, expected, name="ciphertexts")
    for ciphertext in ciphertexts:
        public.check_ciphertext(ciphertext)
    return ciphertexts


def _check_senders(found: Sequence[int], expected: range) -> None:
    if sorted(found) != list(expected):
        raise ValueError(
            f"messages of silos {sorted(found)}: expected one each of {list(expected)}"
        )


def _check_all_there(found: Sequence[int], silos: int) -> None:
    missing = sorted(set(range(silos)) - set(found))
    if missing:
        raise IncompleteRound(f"silos {missing} sent nothing: expected all {silos}")
    _check_senders(found, range(silos))


def _check_later(round_number: int, last: int) -> None:
    if round_number <= last:
        raise ProtocolError(f"round {round_number}: expected a number above {last}")
