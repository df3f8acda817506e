"""Settings of private weighting over Paillier, and the messages whose lengths they determine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flower_ext.checks import Checked, Count, Positive, are_integers
from flower_ext.errors import InvalidValue
from flower_ext.secure.messages import ProtocolMessage
from flower_ext.secure.weighting.agreement import PartySettings, SumMessage
from flower_ext.secure.weighting.encoding import FixedPoint, Packing
from flower_ext.secure.weighting.oblivious import POINT_BYTES, SEAL_BYTES
from flower_ext.secure.weighting.paillier import SECURE_KEY_BITS, check_key_bits

_MOST_RECORDS = 2**24
"""Largest ``max_records_per_user``. A silo finds factors of the modulus up to 2^24 in a second."""


@dataclass(frozen=True, kw_only=True)
class PaillierOptions(Checked):
    """Fields of `PrivateWeighting` and `PaillierSettings`; `PrivateWeighting` explains them."""

    max_records_per_user: Count = 2000
    allowed_totals: tuple[int, ...] | None = None
    silo_record_limits: tuple[int, ...] | None = None
    precision: Positive = 1e-10
    key_bits: Count = SECURE_KEY_BITS
    allow_insecure_key_size: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_key_bits(self.key_bits, allow_insecure_key_size=self.allow_insecure_key_size)
        most, totals = self.max_records_per_user, self.allowed_totals
        if most > _MOST_RECORDS:
            raise InvalidValue(
                f"max_records_per_user={most}: expected fewer records per user, at most "
                f"{_MOST_RECORDS}"
            )
        if totals is not None and not are_integers(totals, least=1, most=most):
            raise InvalidValue(
                f"allowed_totals={totals!r}: expected integers from 1 to "
                f"max_records_per_user={most}"
            )
        limits = self.silo_record_limits
        if limits is not None and not (are_integers(limits, least=0) and sum(limits) <= most):
            raise InvalidValue(
                f"silo_record_limits={limits!r}: expected integers >= 0 that sum to at most "
                f"max_records_per_user={most}"
            )
        _ = self.common_multiple  # refuses numbers of records that need a larger key

    @cached_property
    def common_multiple(self) -> int:
        """C_LCM: a multiple of every number of records that a user may have."""
        multiple = 1
        for total in self.allowed_totals or range(1, self.max_records_per_user + 1):
            multiple = math.lcm(multiple, total)
            if multiple.bit_length() > self.key_bits:
                raise InvalidValue(
                    "the least common multiple of all totals up to max_records_per_user="
                    f"{self.max_records_per_user} does not fit a plaintext of {self.key_bits} "
                    "bits: expected fewer records per user, fewer allowed totals, or a larger key"
                )
        return multiple


@dataclass(frozen=True, kw_only=True)
class PaillierSettings(PaillierOptions, PartySettings):
    """Public settings of one run of the protocol, checked before any encryption.

    If a user may have only a few different numbers of records, their least common multiple is
    small, so that many coordinates fit one plaintext. Without ``silo_record_limits``, the server
    notices only from a decrypted sum that a user has too many records over all silos (see
    `PaillierServer.close_round`).

    ``update_bound`` bounds the magnitude of each coordinate of an update; the clipping norm is such
    a bound. ``noise_bound`` bounds each coordinate of one silo's noise. A generous bound costs
    little. Settings are refused if a sum could reach half the modulus (condition 2 of Theorem 1).
    """

    kind = "paillier"

    update_bound: float
    noise_bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.silo_record_limits is not None and len(self.silo_record_limits) != self.silos:
            raise InvalidValue(
                f"silo_record_limits={self.silo_record_limits!r}: expected {self.silos} integers, "
                "one for each silo"
            )
        _ = self.encoding, self.noise_encoding, self.packing  # each checks its own sizes

    @property
    def step(self) -> float:
        """Distance between neighbouring encoded values.

        Rounding adds an error of at most half a step for each user and for each silo, and each
        silo's dither adds another half. All of them together stay within ``precision``.
        """
        return 2 * self.precision / (self.users + 2 * self.silos)

    @cached_property
    def encoding(self) -> FixedPoint:
        """Encoding of updates."""
        return FixedPoint(step=self.step, bound=self.update_bound)

    @cached_property
    def noise_encoding(self) -> FixedPoint:
        """Encoding of noise, with the same step as for updates, and bounded by ``noise_bound``."""
        return FixedPoint(step=self.step, bound=self.noise_bound)

    @property
    def sensitivity(self) -> float:
        """Largest change that one user can make to a decoded sum, in units of the clipping norm.

        Encoding moves each coordinate of an update by half a step at most. Adding the dither is
        equivalent to rounding the sum to whole steps at random, which moves a coordinate by less
        than one step.
        """
        return 1 + 1.5 * math.sqrt(self.coordinates) * self.step / self.update_bound

    @property
    def insecurity(self) -> str:
        """Text that says that keys may be too short; empty if the settings refuse short keys."""
        if not self.allow_insecure_key_size:
            return ""
        return f"keys of {self.key_bits} bits that may be insecure"

    @property
    def sum_bound(self) -> int:
        """Largest magnitude of a coordinate of the encoded sum.

        A user's weights sum to one over the silos, so the user adds at most the largest coordinate
        of one update. A silo adds its noise and a dither of at most half a step.
        """
        users = self.users * self.encoding.largest
        return self.common_multiple * (users + self.silos * (self.noise_encoding.largest + 1))

    @cached_property
    def packing(self) -> Packing:
        """Layout of the coordinates that share one ciphertext."""
        smallest_modulus = 1 << (self.key_bits - 1)
        return Packing.fitting(self.sum_bound, smallest_modulus)

    @property
    def ciphertexts(self) -> int:
        """Number of ciphertexts that a silo uploads in a round."""
        return -(-self.coordinates // self.packing.slots)

    @property
    def count_bytes(self) -> int:
        """Length in bytes of a number modulo n."""
        return (self.key_bits + 7) // 8

    @property
    def ciphertext_bytes(self) -> int:
        """Length in bytes of a number modulo n²."""
        return (2 * self.key_bits + 7) // 8

    def record_limit(self, silo: int) -> int:
        """Return the most records that one user may have in ``silo``."""
        limits = self.silo_record_limits
        return self.max_records_per_user if limits is None else limits[silo]


@dataclass(frozen=True, kw_only=True)
class PaillierWeights(ProtocolMessage):
    """The weights of one round, for all silos; a user that takes no part has a weight of zero.

    Without a secret draw, ``weights`` holds one ciphertext per user, and ``offer`` is empty. With a
    secret draw, ``weights`` holds ``draw_choices`` sealed ciphertexts per user, of which the silos
    can open one. ``offer`` is then the server's message of the oblivious transfer that silo 0
    answered for all silos.
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
