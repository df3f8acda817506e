"""Messages of private weighting over Paillier: the modulus, encrypted weights and masked sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gmpy2 import mpz

from flower_ext.secure.messages import Message, pack_numbers, unpack_numbers
from flower_ext.secure.weighting.agreement import SumMessage
from flower_ext.secure.weighting.oblivious import POINT_BYTES, SEAL_BYTES
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_settings import PaillierSettings


@dataclass(frozen=True, kw_only=True)
class PaillierKey(Message):
    """The server's Paillier modulus, for all silos."""

    kind = b"PPsk"

    modulus: bytes

    @classmethod
    def of(cls, public: PublicKey, settings: PaillierSettings) -> PaillierKey:
        """Return the message with the modulus of ``public``."""
        return cls(modulus=pack_numbers([public.n], settings.count_bytes))

    @property
    def public(self) -> PublicKey:
        """The key to encrypt with. Check it before use."""
        return PublicKey(mpz.from_bytes(self.modulus, "big"))

    @classmethod
    def _lengths(cls, settings: PaillierSettings) -> Mapping[str, int]:
        return {"modulus": settings.count_bytes}


@dataclass(frozen=True, kw_only=True)
class PaillierWeights(Message):
    """The weights of one round, for all silos; a user that takes no part has a weight of zero.

    Without a secret draw, ``weights`` holds one ciphertext per user, and ``offer`` is empty. With
    one, it holds P sealed ciphertexts per user, of which the silos can open one, and ``offer`` is
    the server's offer for which silo 0 made all silos' choices.
    """

    kind = b"PPew"

    round_number: int
    offer: bytes
    weights: bytes

    @classmethod
    def _lengths(cls, settings: PaillierSettings) -> Mapping[str, int]:
        size, users = settings.ciphertext_bytes, settings.users
        if settings.draw_choices is None:
            return {"offer": 0, "weights": users * size}
        return {
            "offer": POINT_BYTES,
            "weights": users * settings.draw_choices * (size + SEAL_BYTES),
        }


@dataclass(frozen=True, kw_only=True)
class PaillierSum(SumMessage):
    """A silo's weighted, noised and masked sum of updates, for the server."""

    kind = b"PPsu"

    ciphertexts: bytes

    @classmethod
    def _lengths(cls, settings: PaillierSettings) -> Mapping[str, int]:
        return {"ciphertexts": settings.ciphertexts * settings.ciphertext_bytes}


def pack_ciphertexts(ciphertexts: Sequence[mpz], settings: PaillierSettings) -> bytes:
    """Return ciphertexts, joined."""
    return pack_numbers(ciphertexts, settings.ciphertext_bytes)


def unpack_ciphertexts(data: bytes, settings: PaillierSettings, public: PublicKey) -> list[mpz]:
    """Undo `pack_ciphertexts`.

    Raises
    ------
    ValueError
        A number is not a ciphertext under ``public``.
    """
    ciphertexts = [mpz(number) for number in unpack_numbers(data, settings.ciphertext_bytes)]
    for ciphertext in ciphertexts:
        public.check_ciphertext(ciphertext)
    return ciphertexts
