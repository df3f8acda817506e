"""Estimate the time of a round from a few operations timed on this machine."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import gmpy2
from gmpy2 import mpz

from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.multiexp import choose_windows
from flower_ext.secure.weighting.oblivious import SEAL_BYTES, Receiver, Sender
from flower_ext.secure.weighting.paillier import ZeroPool

_REPEATS = 3
_MULTIPLICATIONS = 2000


@dataclass(frozen=True, kw_only=True)
class RoundEstimate:
    """Seconds of one round on one core, by part, and bytes of one silo.

    Attributes
    ----------
    choose, fold, tables, products, pack, rerandomise : float
        Seconds of one silo. When all users take part, later rounds need neither ``fold`` nor
        ``tables``. ``choose`` is the oblivious transfer of the weights of drawn users.
    encrypt, decrypt : float
        Seconds of the server, for all silos together.
    prepare : float
        Seconds of one silo, once, for `WeightingSilo.prepare`; zero if silos do not call it.
    download_bytes, upload_bytes : int
        Bytes of one silo.
    """

    choose: float
    fold: float
    tables: float
    products: float
    pack: float
    rerandomise: float
    encrypt: float
    decrypt: float
    prepare: float
    download_bytes: int
    upload_bytes: int

    @property
    def silo(self) -> float:
        """Seconds of one silo in a round."""
        return self.choose + self.fold + self.tables + self.products + self.pack + self.rerandomise

    @property
    def server(self) -> float:
        """Seconds of the server in a round."""
        return self.encrypt + self.decrypt


def estimate_round(
    settings: WeightingSettings, *, users_per_silo: int | None = None, prepared: bool = True
) -> RoundEstimate:
    """Estimate a round under ``settings``. The measurement takes less than a second.

    Parameters
    ----------
    users_per_silo : int, optional
        Number of users with records in a silo; by default all.
    prepared : bool
        True if silos call `WeightingSilo.prepare`.
    """
    bits = settings.key_bits
    users = settings.users if users_per_silo is None else users_per_silo
    modulus, prime_squared = _odd(2 * bits), _odd(bits)
    multiplication = _multiplication_seconds(modulus)
    exponentiation = _seconds(gmpy2.powmod, _odd(2 * bits - 1), _odd(bits), modulus)
    half = _seconds(gmpy2.powmod, _odd(bits - 1), _odd(bits // 2), prime_squared)
    windows = choose_windows(
        bases=max(1, users),
        products=settings.coordinates,
        lowest=-settings.encoding.largest,
        highest=settings.encoding.largest,
        modulus_bits=2 * bits,
        table_memory_limit=settings.table_memory_limit,
    )
    transfer = _transfer_seconds(settings) if settings.draw_choices else 0.0
    choices = settings.draw_choices or 1
    seal = SEAL_BYTES if settings.draw_choices else 0
    pool = ZeroPool.size(bits)
    share = math.ceil(settings.ciphertexts / settings.silos)
    return RoundEstimate(
        choose=settings.users * transfer,
        fold=users * exponentiation,
        tables=windows.table_multiplications(users) * multiplication,
        products=settings.coordinates * windows.column_multiplications(users) * multiplication,
        pack=(settings.coordinates - settings.ciphertexts)
        * settings.packing.slot_bits
        * multiplication,
        rerandomise=share * (pool * multiplication if prepared else exponentiation),
        encrypt=settings.users * 2 * choices * half,
        decrypt=settings.ciphertexts * (2 * half + settings.silos * multiplication),
        prepare=pool * exponentiation + ZeroPool.table_multiplications(bits) * multiplication
        if prepared
        else 0.0,
        download_bytes=settings.users * choices * (settings.ciphertext_bytes + seal),
        upload_bytes=settings.ciphertexts * settings.ciphertext_bytes,
    )


def _transfer_seconds(settings: WeightingSettings) -> float:
    """Return the seconds of one transfer at a silo. The server's are small against encryptions."""
    public = Sender(settings.context).public
    options = {"run": settings.context, "transfers": 1, "places": settings.draw_choices or 1}
    return _seconds(lambda: Receiver(public, bytes(32), **options).keys())  # type: ignore[arg-type]


def _odd(bits: int) -> mpz:
    return mpz(secrets.randbits(bits)) | (mpz(1) << (bits - 1)) | 1


def _multiplication_seconds(modulus: mpz) -> float:
    values = [_odd(modulus.bit_length() - 1) for _ in range(100)]

    def multiply() -> mpz:
        product = mpz(1)
        for _ in range(_MULTIPLICATIONS // len(values)):
            for value in values:
                product = product * value % modulus
        return product

    return _seconds(multiply) / _MULTIPLICATIONS


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of the fastest of a few calls."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - started)
    return min(times)
