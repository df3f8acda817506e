"""Messages between the parties. A message holds big-endian numbers of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gmpy2 import mpz

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.labels import check_public
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import PublicKey


@dataclass(frozen=True, kw_only=True)
class SiloKey:
    """A silo's X25519 public key, for all other silos."""

    silo: int
    public: bytes


@dataclass(frozen=True, kw_only=True)
class SealedSeed:
    """The silos' shared seed, sealed by silo 0 for one silo; the server cannot open it."""

    receiver: int
    sealed: bytes


@dataclass(frozen=True, kw_only=True)
class BlindedCounts:
    """A silo's record counts for the server, hidden by a factor and a mask for each user."""

    silo: int
    counts: bytes


@dataclass(frozen=True, kw_only=True)
class EncryptedWeights:
    """One ciphertext per user, for all silos. It encrypts zero for a user that takes no part."""

    round_number: int
    weights: bytes


@dataclass(frozen=True, kw_only=True)
class DrawOffer:
    """The server's offer to draw users in secret, for the silo that answers."""

    round_number: int
    public: bytes


@dataclass(frozen=True, kw_only=True)
class DrawAnswer:
    """The silos' choices, one per user, for the server, which cannot read them."""

    round_number: int
    answer: bytes


@dataclass(frozen=True, kw_only=True)
class SealedWeights:
    """P sealed ciphertexts per user, for all silos. The silos can open one of each P."""

    round_number: int
    public: bytes
    sealed: bytes


@dataclass(frozen=True, kw_only=True)
class MaskedSum:
    """A silo's weighted, noised and masked sum of updates, for the server."""

    round_number: int
    silo: int
    ciphertexts: bytes


def to_bytes(numbers: Sequence[mpz], size: int) -> bytes:
    """Return the numbers, joined, in ``size`` bytes each."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def from_bytes(data: bytes, size: int, count: int, *, name: str) -> list[mpz]:
    """Undo `to_bytes`.

    Raises
    ------
    ValueError
        ``data`` does not hold ``count`` numbers of ``size`` bytes; the message names ``name``.
    """
    if len(data) != size * count:
        raise InvalidValue(f"{name} of {len(data)} bytes: expected {count} numbers of {size} bytes")
    return [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]


def ciphertexts_from(
    data: bytes, settings: WeightingSettings, public: PublicKey, *, count: int | None = None
) -> list[mpz]:
    """Return ciphertexts under ``public``: ``count``, or by default as many as a silo uploads.

    Raises
    ------
    ValueError
        The length is wrong, or a number is not a ciphertext.
    """
    expected = settings.ciphertexts if count is None else count
    ciphertexts = from_bytes(data, settings.ciphertext_bytes, expected, name="ciphertexts")
    for ciphertext in ciphertexts:
        public.check_ciphertext(ciphertext)
    return ciphertexts


def check_senders(found: Sequence[int], expected: range) -> None:
    """Raise a ValueError unless each expected silo sent exactly one message."""
    if sorted(found) != list(expected):
        raise InvalidValue(
            f"messages of silos {sorted(found)}: expected one each from {list(expected)}"
        )


def check_keys(keys: Mapping[int, bytes]) -> None:
    """Raise a ValueError that names the first silo whose public key nobody can agree with.

    A key that two silos sent is such a key: one of them repeats what the other said.
    """
    first: dict[bytes, int] = {}
    for silo, public in keys.items():
        if (other := first.setdefault(public, silo)) != silo:
            raise InvalidValue(f"silos {other} and {silo}: expected a different public key of each")
        try:
            check_public(public)
        except InvalidValue as error:
            raise InvalidValue(f"silo {silo}: {error}") from error


def check_all_there(found: Sequence[int], silos: int) -> None:
    """Raise IncompleteRound if a silo sent nothing, and ValueError for surplus messages."""
    missing = sorted(set(range(silos)) - set(found))
    if missing:
        raise IncompleteRound(f"silos {missing} sent nothing: expected messages from all {silos}")
    check_senders(found, range(silos))


def check_later(round_number: int, last: int) -> None:
    """Raise a ProtocolError unless the round number is above the last one."""
    if round_number <= last:
        raise ProtocolError(f"round {round_number}: expected a number above {last}")
