"""One epoch's encrypted weights: the server encrypts M candidates per user, and silos open one.

The silos open y_u · ⌊2^k / N_u⌋, and the server does not know N_u. Here y_u is 1 if the user was
drawn and 0 otherwise. The server sends b_u = e_u - a_u · s without β_u, the word of the constant
coefficient. For every i = 0, …, M - 1 it sends an *entry*: the word β_u + y_u · W[x_u - i],
encrypted under a key of its own. W is `weight_table`. The silos hold only the key at
i = ρ_u = x_u - N_u. If no party may know who is drawn, every entry has two columns (see `columns`),
and opening an entry also takes the key of its column.

The a_u and all pads depend on 32 random bytes, which are new in every set of weights. A server that
was restored from an older state may encrypt two sets for one epoch, with different y_u. With the
same a_u and pads, the difference of both sets would be ⌊2^k / N_u⌋ with a small error, which shows
N_u. The random bytes prevent this.
"""

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, derive
from flower_ext_lattice import ring
from flower_ext_lattice.columns import Columns
from flower_ext_lattice.keys import SecretKey, key_pairs
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.messages import LatticeWeights
from flower_ext_lattice.ring import PRIMES, RESIDUE_BYTES, Reals
from flower_ext_lattice.samplers import Stream, public_polynomial
from flower_ext_lattice.settings import NONCE_BYTES, WEIGHT_BITS, LatticeSettings

_ENTRY_BYTES = 2 * RESIDUE_BYTES
_TOGETHER = 64
"""Largest number of users whose polynomials are made together."""


def weight_table(size: int) -> NDArray[np.int64]:
    """Return W: zero, and ⌊2^k / j⌋ for every j from 1 to ``size - 1``."""
    return np.array([0] + [2**WEIGHT_BITS // j for j in range(1, size)], dtype=np.int64)


def encrypt(
    settings: LatticeSettings,
    secret: SecretKey,
    public_seed: bytes,
    *,
    epoch: int,
    shifted: Sequence[int],
    columns: Columns,
    keys: Sequence[bytes],
) -> LatticeWeights:
    """Return the encrypted weights of an epoch. Every call draws new a_u, e_u and pads.

    Parameters
    ----------
    epoch : int
        A number never used before, by which silos distinguish sets of weights.
    shifted : Sequence of int
        x_u of every user, in the silos' secret order.
    columns : Columns
        y_u of every user, with the columns' keys if the draw is secret.
    keys : Sequence of bytes
        The M keys of every user, joined.
    """
    users, size = settings.users, settings.table_size
    table, errors = weight_table(size), Stream.fresh()
    words = np.empty((2, users, DEGREE))
    nonce = secrets.token_bytes(NONCE_BYTES)
    label = _label(epoch, nonce)
    for start in range(0, users, _TOGETHER):
        places = range(start, min(start + _TOGETHER, users))
        drawn_errors = errors.errors(len(places) * DEGREE).reshape(-1, DEGREE).astype(np.float64)
        masks = _masks(public_seed, label, places)
        words[:, places.start : places.stop] = secret.encryptions(masks, drawn_errors)
    numbers = np.arange(size)
    # Entry i holds W[x_u − i], which for i = ρ_u is W[N_u].
    sealed = [
        _sealed_entries(
            settings,
            label,
            place,
            # These words, β_u, are sent only inside the entries.
            constants=words[:, place, 0],
            weights=table[(shifted[place] - numbers) % size],
            columns=columns,
            keys=keys[place],
        )
        for place in range(users)
    ]
    return LatticeWeights(
        epoch=epoch, nonce=nonce, words=ring.to_words(words[:, :, 1:]), sealed=b"".join(sealed)
    )


def _sealed_entries(
    settings: LatticeSettings,
    label: bytes,
    place: int,
    *,
    constants: Reals,
    weights: NDArray[np.int64],
    columns: Columns,
    keys: bytes,
) -> bytes:
    """Return the M encrypted entries of the user at ``place``, each in all columns.

    Parameters
    ----------
    constants : float64 (2 primes,)
        The user's β_u.
    weights : int64 (M,)
        The weight that each entry holds, if y_u is 1.
    keys : bytes
        The user's M keys, joined.
    """
    of_columns = weights[:, None] * np.array(columns.drawn[place])
    entries = [
        (int(constant) + of_columns) % modulus.value
        for constant, modulus in zip(constants, PRIMES, strict=True)
    ]
    text = np.frombuffer(ring.to_words(np.stack(entries, axis=2)), np.uint8)
    pads = b"".join(
        _pad(settings, keys[KEY_BYTES * i : KEY_BYTES * (i + 1)], label, place, i)
        for i in range(len(weights))
    )
    text = text ^ np.frombuffer(pads, np.uint8)
    # The pad of an entry covers both columns, so a column needs a pad of its own.
    if columns.keys:
        column_pads = [_column_pad(settings, key, label, place) for key in columns.keys[place]]
        text ^= np.stack(column_pads, axis=1).reshape(-1)
    return text.tobytes()


class OpenedWeights:
    """The weights of one epoch as silos use them: an encryption for each user.

    Parameters
    ----------
    keys : Sequence of bytes
        For every user, in the secret order, the key that the silos hold.
    shifts : Sequence of int
        ρ_u of every user.
    opened_columns : Sequence of (int, bytes), optional
        Number and key of the column that the silos open, for every user, if the draw is secret.

    Raises
    ------
    ValueError
        A residue is not below its prime.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        public_seed: bytes,
        message: LatticeWeights,
        *,
        keys: Sequence[bytes],
        shifts: Sequence[int],
        opened_columns: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        self._public_seed = public_seed
        self._label = label = _label(message.epoch, message.nonce)
        users = settings.users
        shape = (2, users, DEGREE - 1)
        ring.from_words(message.words, shape, name="weights")  # refuses large words
        self._words = np.frombuffer(message.words, np.uint8).reshape(*shape, RESIDUE_BYTES)
        # The silos hold one key for each user. All other entries look random to them.
        opened = bytearray()
        for place, (key, shift) in enumerate(zip(keys, shifts, strict=True)):
            column = opened_columns[place][0] if opened_columns else 0
            at = (place * settings.table_size + shift) * settings.num_columns + column
            entry = np.frombuffer(message.sealed, np.uint8, _ENTRY_BYTES, at * _ENTRY_BYTES)
            pads = np.frombuffer(_pad(settings, key, label, place, shift), np.uint8)
            entry = entry ^ pads.reshape(settings.num_columns, _ENTRY_BYTES)[column]
            if opened_columns:
                entry ^= _column_pad(settings, opened_columns[place][1], label, place)[shift]
            opened += entry.tobytes()
        raw = np.frombuffer(opened, np.uint8).reshape(users, 2, RESIDUE_BYTES).swapaxes(0, 1)
        try:
            self._constants = ring.from_words(raw.tobytes(), (2, users), name="weights")
        except InvalidValue as error:
            raise InvalidValue(
                "weights: an opened word is not below its prime; expected weights that the server "
                "sealed for these silos"
            ) from error

    def encryptions(self, places: Sequence[int]) -> Reals:
        """Return, for each place, the transforms (2 primes, 2 parts, DEGREE) of (b_u, a_u)."""
        # Computed for each use: transforms take 128 KB per user, and their words only 48 KB.
        words = np.empty((2, len(places), DEGREE))
        words[:, :, 0] = self._constants[:, places]
        raw = np.ascontiguousarray(self._words[:, places])
        words[:, :, 1:] = ring.from_words(raw.reshape(-1), raw.shape[:3], name="weights")
        return key_pairs(words, _masks(self._public_seed, self._label, places))


def _label(epoch: int, nonce: bytes) -> bytes:
    """Return the label of one set of weights, 40 bytes, from which its a_u and pads derive."""
    return epoch.to_bytes(8, "big") + nonce


def _masks(public_seed: bytes, label: bytes, places: Sequence[int]) -> Reals:
    """Return the transforms (2, places, DEGREE) of a_u."""
    made = [public_polynomial(public_seed, "weights", label, place) for place in places]
    return np.stack(made, axis=1)


def _pad(settings: LatticeSettings, key: bytes, label: bytes, place: int, number: int) -> bytes:
    """Return the pad of one entry, for all columns, from BLAKE2b as a pseudorandom function."""
    entry = b"%s entry %s %d %d" % (settings.context, label, place, number)
    size = settings.num_columns * _ENTRY_BYTES
    return hashlib.blake2b(entry, key=key, digest_size=size).digest()


def _column_pad(
    settings: LatticeSettings, key: bytes, label: bytes, place: int
) -> NDArray[np.uint8]:
    """Return the pad (M, bytes of an entry) of one column's entries: a stream under ``key``."""
    stream = Stream(derive(key, "column", settings.context, label, place))
    return stream.octets(settings.table_size * _ENTRY_BYTES).reshape(
        settings.table_size, _ENTRY_BYTES
    )
