"""Messages between the server and the silos of private weighting over ring-LWE, and their bytes.

Every message begins with four letters that name its kind, followed by integers of eight bytes
(big-endian) and a body whose length the settings determine. The body holds words of polynomials
as little-endian numbers of 6 bytes (residues, first parts of a sum) or 8 bytes (second parts).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Self

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.lattice.layout import DEGREE
from flower_ext.secure.weighting.lattice.ring import RESIDUE_BYTES
from flower_ext.secure.weighting.lattice.settings import (
    FIRST_WORD_BYTES,
    NONCE_BYTES,
    SECOND_WORD_BYTES,
    LatticeSettings,
)
from flower_ext.secure.weighting.messages import check_later
from flower_ext.secure.weighting.oblivious import ELEMENT_BYTES

SEED_BYTES = 32
"""Length in bytes of seeds, nonces and X25519 keys."""
COUNT_BYTES = 4
"""Length in bytes of a masked count."""
_SEALED_SEED_BYTES = 12 + SEED_BYTES + 16  # nonce, seed, tag


class _Message:
    """A frozen dataclass of integers, followed by one or more fields of bytes.

    Subclasses name their kind and define the lengths of their fields of bytes, in order.
    """

    kind: ClassVar[bytes]
    integers: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]]

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def size(cls, settings: LatticeSettings) -> int:
        """Return the length of a message in bytes."""
        return len(cls.kind) + 8 * len(cls.integers) + sum(cls._lengths(settings))

    def to_bytes(self) -> bytes:
        """Return the message's bytes."""
        head = struct.pack(f">{len(self.integers)}Q", *(getattr(self, i) for i in self.integers))
        return b"".join([self.kind, head, *(getattr(self, part) for part in self.parts)])

    @classmethod
    def from_bytes(cls, data: bytes, settings: LatticeSettings) -> Self:
        """Undo `to_bytes`.

        Raises
        ------
        ValueError
            The bytes are not a message of this kind under these settings: a length is wrong, or a
            silo's number is out of range.
        """
        name, lengths = cls.__name__, cls._lengths(settings)
        if len(data) != cls.size(settings):
            raise InvalidValue(f"{name} of {len(data)} bytes: expected {cls.size(settings)}")
        start = len(cls.kind) + 8 * len(cls.integers)
        view = memoryview(data)
        if view[: len(cls.kind)] != cls.kind:
            raise InvalidValue(f"{name}: expected bytes that begin with {cls.kind!r}")
        integers = struct.unpack_from(f">{len(cls.integers)}Q", data, len(cls.kind))
        fields: dict[str, object] = dict(zip(cls.integers, integers, strict=True))
        for part, length in zip(cls.parts, lengths, strict=True):
            fields[part] = bytes(view[start : start + length])
            start += length
        message = cls(**fields)
        message.check(settings)
        return message

    def check(self, settings: LatticeSettings) -> None:
        """Refuse a message that does not fit ``settings``. Parties check every received message.

        Raises
        ------
        ValueError
            A field has a wrong length, or a silo's number is out of range.
        """
        for part, length in zip(self.parts, self._lengths(settings), strict=True):
            if len(getattr(self, part)) != length:
                raise InvalidValue(
                    f"{type(self).__name__}.{part} of {len(getattr(self, part))} bytes: "
                    f"expected {length}"
                )
        for name in ("silo", "receiver"):
            if name in self.integers and not 0 <= getattr(self, name) < settings.silos:
                raise InvalidValue(
                    f"{name}={getattr(self, name)}: expected an integer from 0 to "
                    f"{settings.silos - 1}"
                )


@dataclass(frozen=True, kw_only=True)
class ServerKey(_Message):
    """The server's public facts, for all silos.

    ``public_seed`` determines pk1, and every a_u together with the nonce of its weights. ``nonce``
    enters the silos' seed. ``transfer`` is the sender's element of the oblivious transfer.
    ``words`` holds the words of pk0.
    """

    kind = b"LWsk"
    parts = ("public_seed", "nonce", "transfer", "words")

    public_seed: bytes
    nonce: bytes
    transfer: bytes
    words: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return SEED_BYTES, SEED_BYTES, ELEMENT_BYTES, 2 * RESIDUE_BYTES * DEGREE


@dataclass(frozen=True, kw_only=True)
class SiloKey(_Message):
    """A silo's X25519 public key, for all other silos."""

    kind = b"LWky"
    integers = ("silo",)
    parts = ("public",)

    silo: int
    public: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (SEED_BYTES,)


@dataclass(frozen=True, kw_only=True)
class SealedSeed(_Message):
    """Silo 0's part of the silos' seed, sealed for one silo; the server cannot open it."""

    kind = b"LWse"
    integers = ("receiver",)
    parts = ("sealed",)

    receiver: int
    sealed: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (_SEALED_SEED_BYTES,)


@dataclass(frozen=True, kw_only=True)
class TransferAnswer(_Message):
    """The silos' choices ρ_u, one group element per user; the server cannot read them."""

    kind = b"LWta"
    parts = ("answer",)

    answer: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (settings.users * ELEMENT_BYTES,)


@dataclass(frozen=True, kw_only=True)
class MaskedCounts(_Message):
    """A silo's record counts modulo M under masks, for the server; silo 0 also adds ρ_u."""

    kind = b"LWmc"
    integers = ("silo",)
    parts = ("counts",)

    silo: int
    counts: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (settings.users * COUNT_BYTES,)


@dataclass(frozen=True, kw_only=True)
class DrawOffer(_Message):
    """The server's offer of an epoch's secret draw, for the silo that answers."""

    kind = b"LWdo"
    integers = ("epoch",)
    parts = ("public",)

    epoch: int
    public: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (ELEMENT_BYTES,)


@dataclass(frozen=True, kw_only=True)
class DrawAnswer(_Message):
    """The silos' choices of an epoch's secret draw; the server cannot read them."""

    kind = b"LWda"
    integers = ("epoch",)
    parts = ("answer",)

    epoch: int
    answer: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (settings.users * ELEMENT_BYTES,)


@dataclass(frozen=True, kw_only=True)
class LatticeWeights(_Message):
    """One epoch's encrypted weights, for all silos.

    ``nonce`` is random, and enters every a_u and every pad, so that no two messages share them,
    even of one epoch. ``words`` holds all words of b_u except the constant one. ``sealed`` holds,
    for each user, M candidates for that word; the silos can open one of them. If the draw is
    secret, there are two columns of candidates, ``columns`` holds their sealed keys, and ``offer``
    is the server's offer for which silo 0 made all silos' choices. Otherwise these two are empty.
    """

    kind = b"LWew"
    integers = ("epoch",)
    parts = ("nonce", "words", "sealed", "offer", "columns")

    epoch: int
    nonce: bytes
    words: bytes
    sealed: bytes
    offer: bytes = b""
    columns: bytes = b""

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        word = 2 * RESIDUE_BYTES
        return (
            NONCE_BYTES,
            settings.users * (DEGREE - 1) * word,
            settings.users * settings.choices * settings.columns * word,
            settings.offer_bytes,
            settings.draw_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class RoundOpening(_Message):
    """The server's request for the sums of one round under the weights of one epoch."""

    kind = b"LWro"
    integers = ("round_number", "epoch")
    parts = ()

    round_number: int
    epoch: int

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class LatticeSum(_Message):
    """A silo's weighted, noised and masked sum of updates, for the server.

    ``first`` holds a word of c0 for each coordinate, and none for the padding of the last block.
    ``second`` holds all words of c1, because a coordinate depends on all words of its block.
    """

    kind = b"LWsu"
    integers = ("round_number", "epoch", "silo")
    parts = ("first", "second")

    round_number: int
    epoch: int
    silo: int
    first: bytes
    second: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> tuple[int, ...]:
        return (
            settings.coordinates * FIRST_WORD_BYTES,
            settings.blocks * DEGREE * SECOND_WORD_BYTES,
        )


def check_round_number(round_number: int, last: int, settings: LatticeSettings) -> None:
    """Refuse a round number that is not above the last one, or above the settings' ``rounds``.

    Raises
    ------
    ProtocolError
        The round number is refused.
    """
    check_later(round_number, last)
    if round_number > settings.rounds:
        raise ProtocolError(
            f"round {round_number}: expected at most rounds={settings.rounds} of the settings"
        )
