"""Masks of one round: ChaCha20 streams that are added to, or subtracted from, arrays in place."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flower_ext.privacy.randomness import keystream
from flower_ext.secure.keys_and_ciphers import agreed, derive

Residues: TypeAlias = NDArray[np.unsignedinteger[Any]]

_BLOCK_BYTES = 1 << 16  # small enough for the processor's nearest caches
_ZEROS = bytes(_BLOCK_BYTES)


def apply_mask(key: bytes, values: Residues, *, subtract: bool = False) -> None:
    """Add the stream of a 32-byte key to a vector in place, modulo 2^32 or 2^64; or subtract it.

    The stream is drawn in blocks, so memory does not grow with the array. Use each key for one
    array only.
    """
    stream, buffer = keystream(key), bytearray(_BLOCK_BYTES)
    drawn: Residues = np.frombuffer(buffer, dtype=values.dtype.newbyteorder("<"))
    step = len(drawn)
    change = np.subtract if subtract else np.add
    for start in range(0, len(values), step):
        part = values[start : start + step]
        stream.update_into(_ZEROS, buffer)
        change(part, drawn[: len(part)], out=part)


def pair_mask_key(
    digest: bytes, private: bytes, *, member: int, other: int, other_public: bytes
) -> bytes:
    """Return the key of the mask that ``member`` and ``other`` share; each computes this key."""
    shared, public = agreed(private, other_public)
    keys = {member: public, other: other_public}
    low, high = sorted(keys)
    return derive(shared, "sum: pair mask", digest, low, high, keys[low], keys[high])


def self_mask_key(digest: bytes, seed: bytes, member: int) -> bytes:
    """Return the key of the mask that only this member knows, from its ``seed``."""
    return derive(seed, "sum: self mask", digest, member)


def commitment(digest: bytes, seed: bytes, member: int) -> bytes:
    """Return a hash of a member's seed, which the member sends to the server.

    When the server later rebuilds the seed, it checks the seed against this hash. Nobody can search
    for the seed, which has 256 random bits.
    """
    return derive(seed, "sum: commitment", digest, member)


def share_hash(digest: bytes, share: bytes, *, owner: int, holder: int, kind: bytes) -> bytes:
    """Return a hash of the share of ``owner``'s secret that ``holder`` receives.

    The owner sends the hash to the server. When the holder reveals the share, the server checks the
    share against the hash.

    The share is the key of its hash. An adversary that lacks only one share to rebuild a secret
    knows every further share as a linear function of one unknown number of 256 bits. It therefore
    sees hashes under related keys. If HKDF-SHA256 is a random oracle, these hashes reveal nothing.
    A pseudorandom function would not be enough, because its outputs under related keys may be
    related.
    """
    return derive(share, "sum: share", digest, owner, holder, kind)


def channel_key(
    digest: bytes, private: bytes, other_public: bytes, *, sender: int, receiver: int
) -> bytes:
    """Return the key that encrypts shares from ``sender`` to ``receiver``, in this direction."""
    shared, public = agreed(private, other_public)
    low, high = sorted((public, other_public))
    return derive(shared, "sum: channel", digest, sender, receiver, low, high)
