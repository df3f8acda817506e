"""A silo's encrypted sum, block by block, and the server's decryption of all silos' sums.

A block is a polynomial whose coefficients are coordinates of an update. Eight blocks form a group,
in which their coefficients alternate: coordinate ``8 * i + lane`` of a group is coefficient i of
its block ``lane``. The last group may have fewer blocks; their number then replaces the 8.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_ext.secure.aggregation.mask_streams import apply_mask
from flower_ext.secure.keys_and_ciphers import derive
from flower_ext.secure.threads import map_slices
from flower_ext_lattice import ring
from flower_ext_lattice.keys import SecretKey
from flower_ext_lattice.layout import DEGREE, GROUP, LANES
from flower_ext_lattice.messages import LatticeSum
from flower_ext_lattice.ring import MODULUS, PRIMES, ROOM, Reals
from flower_ext_lattice.samplers import Stream
from flower_ext_lattice.settings import (
    FIRST_WORD_BYTES,
    STEP_BITS,
    WEIGHT_BITS,
    LatticeSettings,
)
from flower_ext_lattice.six_byte_words import pack, unpack

_CUT_BITS = np.uint64(64 - 8 * FIRST_WORD_BYTES)
"""Number of low bits of each word of c0 that a silo does not send."""
_SQUARES = 512
"""Number of partial sums of squares; with several, additions do not wait for one another."""
_HALF_STEP = 2 ** (STEP_BITS - 1)
_EXCESS = 1 - MODULUS / 2**96
"""Relative excess of a step over 2^24 after the switch from the modulus q to the modulus 2^64. The
switch multiplies a step, 2^56, by 2^64 / q, and q is below 2^96."""


class Group:
    """Eight blocks, or fewer in the last group: the slices of their words and coordinates."""

    def __init__(self, settings: LatticeSettings, number: int) -> None:
        self.number = number
        self.start = number * GROUP
        self.lanes = min(LANES, settings.blocks - number * LANES)
        self.words = slice(self.start, self.start + self.lanes * DEGREE)
        self.coordinates = slice(self.start, min(self.words.stop, settings.coordinates))

    def spread(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return coordinates or words as eight alternating polynomials; zeros fill the rest."""
        if len(flat) == GROUP:
            return flat
        whole = np.zeros(self.lanes * DEGREE, flat.dtype)
        whole[: len(flat)] = flat
        spread = np.zeros((DEGREE, LANES), flat.dtype)
        spread[:, : self.lanes] = whole.reshape(DEGREE, self.lanes)
        return spread.reshape(-1)

    def flat(self, spread: NDArray[Any]) -> NDArray[Any]:
        """Return the coefficients of the group's blocks, out of eight alternating polynomials.

        If the group has fewer than eight blocks, the other polynomials are dropped.
        """
        if self.lanes == LANES:
            return spread
        return spread.reshape(DEGREE, LANES)[:, : self.lanes].reshape(-1)


def _groups(settings: LatticeSettings) -> list[Group]:
    return [Group(settings, number) for number in range(-(-settings.blocks // LANES))]


class EncryptedSum:
    """The encrypted sum Σ_u V_su · (b_u, a_u) over the users that `add` was called with.

    V_su is user u's encoded update times n_su, and (b_u, a_u) encrypts the user's weight. `words`
    returns the sum with noise and masks, rounded. The sum takes 32 bytes of memory per coordinate.

    Parameters
    ----------
    public : float64 (2 primes, 2 parts, DEGREE)
        `keys.public_key`.
    """

    def __init__(self, settings: LatticeSettings, public: Reals) -> None:
        self._settings = settings
        self._public = public
        self._of_groups = _groups(settings)
        self._totals: Reals = np.zeros((len(self._of_groups), 2, 2, GROUP))
        self._added = 0

    def add(
        self,
        updates: Sequence[NDArray[Any]],
        counts: Sequence[int],
        encryptions: Reals,
    ) -> Reals:
        """Add ``count · update`` under encryption for each user; return the updates' L2 norms.

        Parameters
        ----------
        updates : Sequence of arrays
            Of float32 or float64, contiguous, each of shape (coordinates,).
        counts : Sequence of int
        encryptions : float64 (users, 2 primes, 2 parts, DEGREE)
            `OpenedWeights.encryptions`.
        """
        scale = 1.0 / self._settings.step
        # Reduce after every `ROOM` products, before float64 loses exactness.
        reducing = [(self._added + at) % ROOM == ROOM - 1 for at in range(len(updates))]

        def work(parts: Sequence[tuple[Group, int]]) -> list[Reals]:
            scratch, of_parts = np.zeros(GROUP), []
            for group, prime in parts:
                squares, totals = np.zeros((len(updates), _SQUARES)), self._totals[group.number]
                for at, update in enumerate(updates):
                    values = group.spread(update[group.coordinates])
                    ring.add_encoded(
                        values,
                        scale=scale,
                        count=float(counts[at]),
                        squares=squares[at],
                        scratch=scratch,
                        multipliers=encryptions[at][prime],
                        totals=totals[prime],
                        prime=prime,
                    )
                    if reducing[at]:
                        for total in totals[prime]:
                            ring.reduce(total, prime)
                of_parts.append(squares.sum(1))
            return of_parts

        # Take one prime after the other, because two primes together would not fit the caches.
        parts = [(group, prime) for group in self._of_groups for prime in range(len(PRIMES))]
        with np.errstate(invalid="ignore", over="ignore"):
            squares = map_slices(work, parts)
        self._added += len(updates)
        # Each prime sums the squares of all coordinates, so take those of one prime only.
        norms: Reals = np.sqrt(np.sum(squares[:: len(PRIMES)], axis=0)) * self._settings.step
        return norms

    def words(
        self, noise: NDArray[Any], masks: Sequence[tuple[bytes, bool]]
    ) -> tuple[bytes, bytes]:
        """Return the words of c0 and of c1 with noise, dither, fresh randomness and masks.

        Call this method once, because it overwrites the totals.

        Parameters
        ----------
        noise : float (coordinates,)
        masks : Sequence of (bytes, bool)
            Keys from `PairKeys.mask_keys`.
        """
        settings = self._settings
        first = np.empty((settings.coordinates, FIRST_WORD_BYTES), np.uint8)
        second = np.empty(settings.blocks * DEGREE, "<u8")

        def work(groups: Sequence[Group]) -> list[None]:
            for group in groups:
                residues, errors, dither = self._rerandomised(group)
                count = group.coordinates.stop - group.coordinates.start
                # Whole steps: the dither covers everything below one step, so that the sum modulo
                # a step tells nothing.
                steps = np.rint(noise[group.coordinates] / settings.step).astype(np.float64)
                # No word of c0 beyond the coordinates leaves the silo. It would have no noise, and
                # show who takes part.
                words_of_c0 = ring.switch(
                    np.ascontiguousarray(residues[:, 0, :count]), steps, dither[:count]
                )
                words_of_c1 = ring.switch(
                    np.ascontiguousarray(residues[:, 1]), np.zeros(len(errors)), errors
                )
                # Mask whole words, because masks cancel modulo 2^64, and only then drop bytes.
                for key, subtract in masks:
                    apply_mask(derive(key, "first", group.number), words_of_c0, subtract=subtract)
                    apply_mask(derive(key, "second", group.number), words_of_c1, subtract=subtract)
                first[group.coordinates] = pack(words_of_c0 >> _CUT_BITS)
                second[group.words] = words_of_c1
            return [None] * len(groups)

        map_slices(work, self._of_groups)
        self._totals = np.empty((0, 2, 2, GROUP))
        return first.tobytes(), second.tobytes()

    def _rerandomised(self, group: Group) -> tuple[Reals, NDArray[np.int64], NDArray[np.int64]]:
        """Return three arrays: c + r · pk (2 primes, 2 parts, words), fresh errors e2, dithers."""
        # The server knows every a_u, so c1 = Σ V_su · a_u alone would reveal the updates. The fresh
        # encryption of zero, (r · pk0, r · pk1 + e2), makes c1 look uniform.
        stream, count = Stream.fresh(), group.lanes * DEGREE
        fresh = group.spread(stream.ternary(count))
        errors, dither = stream.errors(count), stream.dither(count, WEIGHT_BITS)
        residues = np.empty((2, 2, count))
        for prime in range(len(PRIMES)):
            totals = self._totals[group.number, prime]
            for total in totals:
                ring.reduce(total, prime)
            ring.add_products(fresh.copy(), self._public[prime], totals, prime)
            for part, total in enumerate(totals):
                ring.invert(total, prime)
                residues[prime, part] = group.flat(total)
        return residues, errors, dither


def decrypted(
    settings: LatticeSettings,
    secret: SecretKey,
    messages: Iterable[LatticeSum],
) -> NDArray[np.float64]:
    """Return the sum of all silos, rounded to whole steps. Never publish a finer value."""
    first = np.zeros(settings.coordinates, np.uint64)
    second = np.zeros(settings.blocks * DEGREE, np.uint64)
    sums = list(messages)
    result = np.empty(settings.coordinates)
    # The expected sum of all silos' dithers, less that of the bytes that they drop from words.
    middle = len(sums) * (_HALF_STEP - 2 ** (int(_CUT_BITS) - 1))

    def work(groups: Sequence[Group]) -> list[None]:
        for group in groups:
            _add(first[group.coordinates], second[group.words], sums, group)
            words = first[group.coordinates].view(np.int64)
            words += _opened(group, secret, second[group.words])[: len(words)]
            words -= middle
            # Make a step exactly 2^24. The correction has so few bits that float64 suffices.
            words -= np.rint(words * _EXCESS).astype(np.int64)
            # Round, because the digits below a step depend on s and on users who were not drawn.
            result[group.coordinates] = (words + _HALF_STEP >> STEP_BITS) * settings.step
        return [None] * len(groups)

    map_slices(work, _groups(settings), name="decryption")
    return result


def _add(
    first: NDArray[np.uint64],
    second: NDArray[np.uint64],
    sums: Sequence[LatticeSum],
    group: Group,
) -> None:
    """Add the words of all silos to ``first`` and ``second``, in place."""
    # Sums wrap modulo 2^64, where the silos' masks cancel.
    for message in sums:
        words = np.frombuffer(message.first, np.uint8).reshape(-1, FIRST_WORD_BYTES)
        first += unpack(words[group.coordinates]) << _CUT_BITS
        second += np.frombuffer(message.second, "<u8")[group.words]


def _opened(group: Group, secret: SecretKey, second: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return c1 · s modulo 2^64."""
    # As signed numbers, words of c1 are at most 2^63, and coefficients of c1 · s at most 2^75. The
    # product modulo q is therefore the product itself, which `ring.add_joined` takes modulo 2^64.
    spread = group.spread(second.view(np.int64))
    residues = np.empty((2, len(second)))
    for prime in range(len(PRIMES)):
        total = np.zeros((1, GROUP))
        factor = secret.transforms[prime : prime + 1]
        ring.add_products(ring.to_residues(spread, prime), factor, total, prime)
        ring.invert(total[0], prime)
        residues[prime] = group.flat(total[0])
    product = np.zeros(len(second), np.int64)
    ring.add_joined(product, residues)
    return product
