"""What parties send. Numbers travel as big-endian bytes, all of one length in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gmpy2 import mpz


@dataclass(frozen=True, kw_only=True)
class SiloKey:
    """A silo's X25519 public key, for all other silos."""

    silo: int
    public: bytes


@dataclass(frozen=True, kw_only=True)
class SealedSeed:
    """The seed that silos share, from silo 0, for one silo; the server cannot open it."""

    receiver: int
    sealed: bytes


@dataclass(frozen=True, kw_only=True)
class BlindedCounts:
    """A silo's record counts under a factor and a mask for each user; for the server."""

    silo: int
    counts: bytes


@dataclass(frozen=True, kw_only=True)
class EncryptedWeights:
    """One ciphertext a user, for all silos: of zero for users that take no part."""

    round_number: int
    weights: bytes


@dataclass(frozen=True, kw_only=True)
class MaskedSum:
    """A silo's weighted, noised and masked updates; for the server."""

    round_number: int
    silo: int
    ciphertexts: bytes


def to_bytes(numbers: Sequence[mpz], size: int) -> bytes:
    """Numbers of ``size`` bytes each, one after the other."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def from_bytes(data: bytes, size: int, count: int, *, name: str) -> list[mpz]:
    """Undo `to_bytes`.

    Raises
    ------
    ValueError
        Not ``count`` numbers of ``size`` bytes; the error names the message ``name``.
    """
    if len(data) != size * count:
        raise ValueError(f"{name} of {len(data)} bytes: expected {count} numbers of {size} bytes")
    return [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]
