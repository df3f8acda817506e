"""Shamir's sharing of 32-byte secrets: any t shares give the secret, t - 1 reveal nothing.

Of n shares, up to (n - t) / 2 may be wrong: shares are a Reed-Solomon code, which `candidates`
decodes (Gao, "A new algorithm for decoding Reed-Solomon codes", 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from flower_ext.errors import InvalidValue

PRIME = 2**256 + 297  # the least prime above 2^256, so that the field holds every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33
_DRAWN_BYTES = 48  # 127 bits more than the prime, so remainders are within 2^-127 of uniform

TokenBytes = Callable[[int], bytes]


def split(
    secret: bytes, points: Sequence[int], threshold: int, token_bytes: TokenBytes
) -> dict[int, bytes]:
    """Return one share of ``secret`` for each point.

    Parameters
    ----------
    secret : bytes
        32 bytes.
    points : Sequence[int]
        Different positive numbers at which the polynomial is evaluated.
    threshold : int
        Number of shares that suffice to rebuild the secret.
    token_bytes : Callable[[int], bytes]
        Source of random bytes.

    Raises
    ------
    InvalidValue
        The secret has another length, a point is repeated or not positive, or there are fewer
        points than ``threshold``.
    """
    if len(secret) != SECRET_BYTES:
        raise InvalidValue(f"secret of {len(secret)} bytes: expected {SECRET_BYTES}")
    _check_points(points, threshold)
    coefficients = [
        int.from_bytes(token_bytes(_DRAWN_BYTES), "big") % PRIME for _ in range(threshold - 1)
    ]
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

    Raises
    ------
    InvalidValue
        There are fewer shares than ``threshold``, a share is not a number of the field, or the
        rebuilt value does not fit 32 bytes.
    """
    chosen = sorted(shares)[:threshold]
    _check_points(chosen, threshold)
    secret = _secret(_at_zero({point: field_value(shares[point]) for point in chosen}))
    if secret is None:
        raise InvalidValue("shares: expected shares of one secret of 32 bytes")
    return secret


def candidates(
    shares: Mapping[int, bytes], threshold: int, doubted: Collection[int] = ()
) -> Iterator[tuple[bytes, frozenset[int]]]:
    """Yield secrets that the shares may hold, the likeliest first, with the points of wrong shares.

    The caller must know which secret is right, for example by its hash. The right one is among them
    if at most half of the shares beyond ``threshold`` are wrong, or a single one is. The work grows
    with the square of the number of shares, whatever the shares are.

    Parameters
    ----------
    doubted : Collection[int]
        Points whose shares of other secrets were wrong, which are used last.

    Raises
    ------
    InvalidValue
        There are fewer shares than ``threshold``, or a share is not a number of the field.
    """
    _check_points([*shares], threshold)
    values = {point: field_value(share) for point, share in shares.items()}
    trusted = {point: value for point, value in values.items() if point not in doubted}
    by_trust = sorted(values, key=lambda point: (point in doubted, point))
    chosen = {point: values[point] for point in by_trust[:threshold]}
    if (secret := _secret(_at_zero(chosen))) is not None:
        yield secret, frozenset()
    for group in (trusted, values) if len(trusted) < len(values) else (values,):
        for value, wrong in _decoded(group, threshold):
            if (secret := _secret(value)) is not None:
                yield secret, wrong


def field_value(share: bytes) -> int:
    """Return a share as a number; raise `InvalidValue` if it is malformed."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise InvalidValue(f"share: expected {SHARE_BYTES} bytes, a number below 2^256 + 297")
    return value


def _secret(value: int) -> bytes | None:
    """Return a value of the field as a secret, or None if it does not fit 32 bytes."""
    return value.to_bytes(SECRET_BYTES, "big") if value >> (8 * SECRET_BYTES) == 0 else None


def _at_zero(values: Mapping[int, int]) -> int:
    """Return the value at 0 of the polynomial through all points."""
    total, numerator = 0, 1
    for point in values:
        numerator = numerator * point % PRIME
    for point, value in values.items():
        denominator = point
        for other in values:
            if other != point:
                denominator = denominator * (other - point) % PRIME
        total += value * numerator * pow(denominator, -1, PRIME)
    return total % PRIME


def _decoded(values: Mapping[int, int], threshold: int) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield possible values at 0 of the polynomial near all values, and the points that it misses.

    There is one, if a polynomial with ``threshold`` coefficients misses at most half of the surplus
    points, and else none. With a single surplus point, each may be the one that is missed.
    Polynomials are lists of coefficients, the lowest first.
    """
    if len(values) == threshold + 1:
        for wrong in values:
            others = {point: value for point, value in values.items() if point != wrong}
            yield _at_zero(others), frozenset({wrong})
    if len(values) < threshold + 2:
        return
    vanishing, through = [1], list[int]()
    for point, value in values.items():  # Newton's interpolation
        factor = (value - _at(through, point)) * pow(_at(vanishing, point), -1, PRIME)
        through = _plus(through, vanishing, factor)
        vanishing = _plus([0, *vanishing], vanishing, -point)
    # Euclid's algorithm, stopped half-way: the remainder is the polynomial times the locator, whose
    # zeros are the wrong points.
    before, now, last, locator = vanishing, through, list[int](), [1]
    while 2 * (len(now) - 1) >= len(values) + threshold:
        quotient, rest = _divided(before, now)
        before, now = now, rest
        last, locator = locator, _minus_product(last, quotient, locator)
    polynomial, rest = _divided(now, locator)
    if not rest and len(polynomial) <= threshold:
        missed = (point for point, value in values.items() if _at(polynomial, point) != value)
        yield _at(polynomial, 0), frozenset(missed)


def _at(polynomial: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * point + coefficient) % PRIME
    return value


def _plus(left: Sequence[int], right: Sequence[int], factor: int) -> list[int]:
    """Return left + factor · right, without zeros at its end."""
    total = [*left, *[0] * (len(right) - len(left))]
    for power, coefficient in enumerate(right):
        total[power] = (total[power] + factor * coefficient) % PRIME
    while total and total[-1] == 0:
        total.pop()
    return total


def _minus_product(left: Sequence[int], one: Sequence[int], two: Sequence[int]) -> list[int]:
    """Return left − one · two."""
    total = [*left]
    for power, coefficient in enumerate(one):
        total = _plus(total, [*[0] * power, *two], -coefficient)
    return total


def _divided(over: Sequence[int], under: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the quotient and the remainder of two polynomials."""
    rest, quotient = [*over], [0] * max(0, len(over) - len(under) + 1)
    inverse = pow(under[-1], -1, PRIME)
    while len(rest) >= len(under):
        power = len(rest) - len(under)
        quotient[power] = rest[-1] * inverse % PRIME
        rest = _plus(rest, [*[0] * power, *under], -quotient[power])
    return quotient, rest


def _check_points(points: Sequence[int], threshold: int) -> None:
    if len(set(points)) != len(points) or any(not 0 < point < 2**32 for point in points):
        raise InvalidValue(f"points={list(points)}: expected different integers from 1 to 2^32 - 1")
    if not 1 <= threshold <= len(points):
        raise InvalidValue(
            f"threshold={threshold}: expected 1 to {len(points)}, the number of shares; "
            "wait for more shares or share with more members"
        )
