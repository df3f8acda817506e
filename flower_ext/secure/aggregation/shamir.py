"""Shamir's sharing of 32-byte secrets: any t shares give the secret, and t - 1 reveal nothing."""

import secrets
from collections.abc import Mapping, Sequence

from flower_ext.errors import InvalidValue

PRIME = 2**256 + 297  # the least prime above 2^256, so that the field holds every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33
_DRAWN_BYTES = 48  # 127 bits more than the prime, so remainders are within 2^-127 of uniform


def split_secret(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Return one share of ``secret`` for each point; ``threshold`` shares suffice to rebuild it.

    Each share is the value of a random polynomial at a point, and points are positive numbers.
    """
    if len(secret) != SECRET_BYTES:
        raise InvalidValue(f"secret of {len(secret)} bytes: expected {SECRET_BYTES}")
    _check_points(points, threshold)
    drawn = (secrets.token_bytes(_DRAWN_BYTES) for _ in range(threshold - 1))
    coefficients = [int.from_bytes(number, "big") % PRIME for number in drawn]
    coefficients.append(int.from_bytes(secret, "big"))  # the highest power comes first
    shares = {}
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Rebuild the secret from the first ``threshold`` shares. Wrong shares give a wrong secret.

    Raise an error if there are too few shares, if a share is outside the field, or if the rebuilt
    secret has more than 32 bytes.
    """
    chosen = sorted(shares)[:threshold]
    _check_points(chosen, threshold)
    values = {point: field_value(shares[point]) for point in chosen}
    secret = 0
    for point, value in values.items():  # Lagrange's interpolation at 0
        numerator = denominator = 1
        for other in values:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        secret = (secret + value * numerator * pow(denominator, -1, PRIME)) % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise InvalidValue("shares: expected unchanged shares of one secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


def field_value(share: bytes) -> int:
    """Return a share as a number; raise `InvalidValue` if it is malformed."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise InvalidValue(f"share: expected {SHARE_BYTES} bytes, a number below 2^256 + 297")
    return value


def _check_points(points: Sequence[int], threshold: int) -> None:
    if len(set(points)) != len(points) or any(not 0 < point < 2**32 for point in points):
        raise InvalidValue(f"points={list(points)}: expected different integers from 1 to 2^32 - 1")
    if not 1 <= threshold <= len(points):
        raise InvalidValue(
            f"threshold={threshold}: expected 1 to {len(points)}, the number of shares; "
            "wait for more shares, or split the secret among more members"
        )
