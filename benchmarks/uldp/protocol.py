"""Time of the private weighting protocol: a plain version with `phe` against `flower_ext.secure`.

    python -m benchmarks.uldp.protocol

All parties run in this process, one after the other, with a 3072-bit key and N_max = 2000. The
plain version takes one full exponentiation for every user and coordinate. A few coordinates of one
silo are timed, and the rest is extrapolated. The default takes three minutes on two cores, with 100
coordinates; ``--full`` takes a quarter of an hour, with 1,000. Every setting sums fresh encryptions
of all users. Seconds are of the clock and, after a slash, of the processor, which other jobs on the
machine disturb less.
"""

from __future__ import annotations

import argparse
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import gmpy2
import numpy as np
import phe
from gmpy2 import mpz

from benchmarks.uldp.dialogue import open_round, set_up, weigh
from flower_ext.runs.page import table
from flower_ext.secure import threads
from flower_ext.secure.threads import map_slices
from flower_ext.secure.weighting.multiexp import FixedBaseProducts
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_settings import PaillierSettings
from flower_ext.secure.weighting.paillier_silo import PaillierSilo

BASE = PaillierSettings(
    run="benchmark",
    users=100,
    silos=3,
    coordinates=1000,
    max_records_per_user=2000,
    update_bound=1.0,
    noise_bound=64.0,
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Seconds:
    """Seconds of the clock, and of all busy cores."""

    clock: float
    processor: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.clock + other.clock, self.processor + other.processor)

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.clock * factor, self.processor * factor)

    def __str__(self) -> str:
        return f"{self.clock:.2f} / {self.processor:.2f}"

    def times(self, other: Seconds) -> str:
        """Return the ratio to ``other`` as text."""
        clock, processor = self.clock / other.clock, self.processor / other.processor
        return f"{clock:.0f} / {processor:.0f}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements."""

    coordinates: int
    plain_coordinates: int
    growth: tuple[int, ...]
    users: tuple[int, ...]


DEFAULT = Scale(coordinates=100, plain_coordinates=1, growth=(50, 100, 200), users=(25, 50, 100))
FULL = Scale(
    coordinates=1000, plain_coordinates=2, growth=(250, 500, 1000, 2000), users=(25, 50, 100, 200)
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Time of one round, of the server and of all silos together."""

    encrypt: Seconds
    silos: Seconds
    decrypt: Seconds
    error: float
    upload: int

    @property
    def total(self) -> Seconds:
        """Seconds of all parties, one after the other."""
        return self.encrypt + self.silos + self.decrypt


class Parties:
    """Server and silos after set-up, and an input."""

    def __init__(self, settings: PaillierSettings, key: PrivateKey, workers: int) -> None:
        threads.cores = lambda: workers
        self.settings = settings
        self.server = PaillierServer(settings, key=key)
        self.silos = [PaillierSilo(settings, i) for i in range(settings.silos)]
        rng = np.random.default_rng(0)
        most = settings.max_records_per_user // settings.silos
        self.counts = rng.integers(1, most, (settings.silos, settings.users), endpoint=True)
        set_up(self.server, self.silos, self.counts)
        self.updates = rng.uniform(-1, 1, (settings.silos, settings.users, settings.coordinates))
        self.noise = rng.normal(0, 3, (settings.silos, settings.coordinates))

    def round(self, number: int) -> Round:
        """Run one round, and check it against the plain sum."""
        encrypt, message = timed(lambda: open_round(self.server, number))
        silos, sums = timed(
            lambda: [
                weigh(silo, number, message, dict(enumerate(self.updates[i])), self.noise[i])
                for i, silo in enumerate(self.silos)
            ]
        )
        read = [self.server.read_sum(i, data) for i, data in enumerate(sums)]
        decrypt, found = timed(lambda: self.server.close_round(read))
        weights = self.counts / self.counts.sum(0)
        plain = np.einsum("su,suc->c", weights, self.updates) + self.noise.sum(0)
        return Round(
            encrypt=encrypt,
            silos=silos,
            decrypt=decrypt,
            error=float(np.abs(found - plain).max()),
            upload=len(read[0].ciphertexts),
        )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uldp.protocol",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="1,000 coordinates")
    parser.add_argument("--workers", type=int, default=2, help="threads of the parallel runs")
    arguments = parser.parse_args()
    scale = FULL if arguments.full else DEFAULT

    key = generate_key()
    settings = replace(BASE, coordinates=scale.coordinates)
    side_by_side(settings, key, arguments.workers, scale)
    by_part(settings, key, arguments.workers)
    growth(settings, key, arguments.workers, scale)


def plain_seconds(key: PrivateKey, settings: PaillierSettings, coordinates: int) -> Seconds:
    """Return a plain round's time with phe, extrapolated from a few coordinates of one silo."""
    public = phe.PaillierPublicKey(int(key.public.n))
    private = phe.PaillierPrivateKey(public, int(key.p), int(key.q))
    users = min(settings.users, 20)
    numbers = [secrets.randbelow(public.n) for _ in range(users)]
    encrypting, ciphertexts = timed(lambda: [public.raw_encrypt(x) for x in numbers])
    encrypted = [phe.EncryptedNumber(public, ciphertext) for ciphertext in ciphertexts]

    def multiply() -> int:
        for _ in range(coordinates * settings.users // users):
            total = 1
            for number in encrypted:  # update · n_su · r_u · C_LCM modulo n has full length
                power = number._raw_mul(secrets.randbelow(public.n))
                total = encrypted[0]._raw_add(total, power)
        return total

    multiplying, total = timed(multiply)
    decrypting, _ = timed(lambda: [private.raw_decrypt(total) for _ in range(10)])
    return (
        multiplying * (settings.silos * settings.coordinates / coordinates)
        + encrypting * (settings.users / users)
        + decrypting * (settings.coordinates / 10)
    )


def side_by_side(settings: PaillierSettings, key: PrivateKey, workers: int, scale: Scale) -> None:
    """Print whole rounds, all parties together; time the plain version anew beside each."""
    packed = replace(settings, max_records_per_user=120)
    small = replace(settings, users=10, coordinates=16)
    sizes = (
        (settings, 1),
        (packed, 1),
        (small, 1),
        (settings, workers),
        (packed, workers),
    )
    header = (
        "round of 3 silos",
        "threads",
        "plain, s",
        "here, s",
        "times as fast",
        "upload, times smaller",
        "largest error",
    )
    print(table(header, []), flush=True)
    for at, count in sizes:
        plain = plain_seconds(key, at, scale.plain_coordinates)
        done = Parties(at, key, count).round(1)
        row = (
            f"{at.users} users, {at.coordinates} coordinates, N_max {at.max_records_per_user}",
            count,
            plain,
            done.total,
            plain.times(done.total),
            f"{at.coordinates * at.ciphertext_bytes / done.upload:.1f}",
            f"{done.error:.1e}",
        )
        print(_row(row), flush=True)
    print()


def by_part(settings: PaillierSettings, key: PrivateKey, workers: int) -> None:
    """Print the parts of a round, for all silos, timed one by one."""
    alone, together = (parts(settings, key, count) for count in (1, workers))
    rows = [(name, str(alone[name]), str(together[name])) for name in alone]
    print(table(("part, all silos", "1 thread, s", f"{workers} threads, s"), rows))
    digits = math.ceil((2 * settings.encoding.largest).bit_length() / 7)
    count = settings.silos * settings.coordinates * digits * (settings.users + 7)
    one = one_multiplication(key.public.n_squared)
    print(
        f"\nProducts: {count} multiplications of {1e6 * one:.2f} processor µs, "
        f"{alone['products'].processor / (count * one):.2f} times that long\n"
    )


def parts(settings: PaillierSettings, key: PrivateKey, workers: int) -> dict[str, Seconds]:
    """Return the seconds of every part; a silo's parts count for all silos."""
    threads.cores = lambda: workers
    public, silos, largest = key.public, settings.silos, settings.encoding.largest
    exponents = np.random.default_rng(1).integers(
        -largest, largest, (settings.users, settings.coordinates)
    )

    def fold(weights: Sequence[mpz]) -> list[mpz]:
        return [
            gmpy2.powmod(weight, mpz(secrets.randbelow(int(public.n))), public.n_squared)
            for weight in weights
        ]

    encrypt, weights = timed(lambda: key.encrypt([mpz(1)] * settings.users))
    folding, bases = timed(lambda: map_slices(fold, weights))
    tables, products = timed(lambda: FixedBaseProducts(bases, public.n_squared, largest=largest))
    multiply, sums = timed(lambda: products.of(exponents))
    share = math.ceil(settings.ciphertexts / silos)
    rerandomise, _ = timed(lambda: public.zeros(share))
    decrypt, _ = timed(lambda: key.decrypt(sums[: settings.ciphertexts]))
    return {
        "encrypt (server)": encrypt,
        "fold": folding * silos,
        "tables": tables * silos,
        "products": multiply * silos,
        "re-randomise": rerandomise * silos,
        "decrypt (server)": decrypt,
    }


def growth(settings: PaillierSettings, key: PrivateKey, workers: int, scale: Scale) -> None:
    """Print seconds against coordinates and users."""
    header = ("users", "coordinates", f"one silo, {workers} threads, s", "server, s")
    print(table(header, []), flush=True)
    sizes = [replace(settings, coordinates=count) for count in scale.growth]
    sizes += [replace(settings, users=count) for count in scale.users]
    for at in sizes:
        done = Parties(at, key, workers).round(1)
        silo, server = done.silos * (1 / at.silos), done.encrypt + done.decrypt
        print(_row((at.users, at.coordinates, silo, server)), flush=True)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def one_multiplication(modulus: mpz) -> float:
    """Return processor seconds of one modular multiplication in a chain."""
    values = [mpz(secrets.randbelow(int(modulus))) for _ in range(100)]

    def multiply() -> None:
        total = mpz(1)
        for _ in range(20):
            for value in values:
                total = total * value % modulus

    return min(timed(multiply)[0].processor for _ in range(5)) / (20 * len(values))


def timed(work: Callable[[], Result]) -> tuple[Seconds, Result]:
    """Return the seconds of ``work``, and its result."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return Seconds(time.perf_counter() - clock, time.process_time() - processor), result


if __name__ == "__main__":
    main()
