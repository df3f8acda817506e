"""What parties send. Numbers travel as big-endian bytes, all of one length in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gmpy2 import mpz

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import PublicKey


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
class DrawOffer:
    """The server begins to draw users whom it will not know; for the silo that answers."""

    round_number: int
    public: bytes


@dataclass(frozen=True, kw_only=True)
class DrawAnswer:
    """The silos' choices, one for each user, which the server cannot read."""

    round_number: int
    answer: bytes


@dataclass(frozen=True, kw_only=True)
class SealedWeights:
    """P sealed ciphertexts for each user, for all silos, which can open one of each P."""

    round_number: int
    public: bytes
    sealed: bytes


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
        raise InvalidValue(f"{name} of {len(data)} bytes: expected {count} numbers of {size} bytes")
    return [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]


def ciphertexts_from(
    data: bytes, settings: WeightingSettings, public: PublicKey, *, count: int | None = None
) -> list[mpz]:
    """Ciphertexts under ``public``: as many as a silo uploads, or ``count``.

    Raises
    ------
    ValueError
        A wrong length, or something that is no ciphertext.
    """
    expected = settings.ciphertexts if count is None else count
    ciphertexts = from_bytes(data, settings.ciphertext_bytes, expected, name="ciphertexts")
    for ciphertext in ciphertexts:
        public.check_ciphertext(ciphertext)
    return ciphertexts


def check_senders(found: Sequence[int], expected: range) -> None:
    """Refuse anything but one message of each expected silo."""
    if sorted(found) != list(expected):
        raise InvalidValue(
            f"messages of silos {sorted(found)}: expected one each of {list(expected)}"
        )


def check_all_there(found: Sequence[int], silos: int) -> None:
    """Refuse fewer than all silos' messages (`IncompleteRound`), and more."""
    missing = sorted(set(range(silos)) - set(found))
    if missing:
        raise IncompleteRound(f"silos {missing} sent nothing: expected all {silos}")
    check_senders(found, range(silos))


def check_later(round_number: int, last: int) -> None:
    """Refuse a round number that does not rise."""
    if round_number <= last:
        raise ProtocolError(f"round {round_number}: expected a number above {last}")
