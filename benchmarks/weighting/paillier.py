"""Private weighting over Paillier: rounds beside a plain version with `phe`, and their growth.

    python -m benchmarks paillier

All parties run in this process, one after the other on one thread, with a 3072-bit key. The plain
version takes one full exponentiation for every user and coordinate. A few coordinates of one silo
are timed, and the rest is extrapolated. The default takes some minutes, with 100 coordinates;
``--full`` takes a quarter of an hour, with 1,000. Every round sums fresh encryptions of all users.
Seconds are of the processor, which other jobs on the machine disturb less.
"""

import logging
import secrets
from dataclasses import dataclass, replace

import numpy as np
import phe

from benchmarks.command_line import command_parser
from benchmarks.weighting.dialogue import big_integer_threads, open_round, set_up, timed, weigh
from flower_ext.runs.page import table
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
    """Processor seconds of one round, for the server and for all silos together."""

    server: float
    silos: float
    error: float
    upload: int


class Parties:
    """Server and silos after set-up, and an input."""

    @big_integer_threads(1)
    def __init__(self, settings: PaillierSettings, key: PrivateKey | None = None) -> None:
        self.settings = settings
        self.server = PaillierServer(settings, key=key)
        self.silos = [PaillierSilo(settings, i) for i in range(settings.silos)]
        rng = np.random.default_rng(0)
        most = settings.max_records_per_user // settings.silos
        self.counts = rng.integers(1, most, (settings.silos, settings.users), endpoint=True)
        set_up(self.server, self.silos, self.counts)
        self.updates = rng.uniform(-1, 1, (settings.silos, settings.users, settings.coordinates))
        self.noise = rng.normal(0, 3, (settings.silos, settings.coordinates))

    @big_integer_threads(1)
    def round(self, number: int) -> Round:
        """Run one round, and compare it with the plain sum."""
        message, encrypting = timed(open_round, self.server, number)
        weighing = 0.0
        for index, silo in enumerate(self.silos):
            updates = dict(enumerate(self.updates[index]))
            masked, seconds = timed(weigh, silo, number, message, updates, self.noise[index])
            self.server.add_sum(index, masked)
            weighing += seconds
        total, decrypting = timed(self.server.close_round)
        weights = self.counts / self.counts.sum(0)
        plain = np.einsum("su,suc->c", weights, self.updates) + self.noise.sum(0)
        return Round(
            server=encrypting + decrypting,
            silos=weighing,
            error=float(np.abs(total - plain).max()),
            upload=self.server.settings.ciphertexts * self.server.settings.ciphertext_bytes,
        )


def main() -> None:
    """Print both tables."""
    parser = command_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="1,000 coordinates")
    scale = FULL if parser.parse_args().full else DEFAULT
    logging.getLogger("flwr").setLevel(logging.ERROR)
    key = generate_key()
    settings = replace(BASE, coordinates=scale.coordinates)
    print(side_by_side(settings, key, scale))
    print(growth(settings, key, scale))


def side_by_side(settings: PaillierSettings, key: PrivateKey, scale: Scale) -> str:
    """Return the seconds of whole rounds of all parties, and of the plain version beside each."""
    rows = []
    for at in (
        settings,
        replace(settings, max_records_per_user=120),
        replace(settings, users=10, coordinates=16),
        replace(settings, silos=5),
    ):
        plain = plain_seconds(key, at, scale.plain_coordinates)
        cost = Parties(at, key).round(1)
        packed = cost.server + cost.silos
        rows.append(
            (
                f"{at.silos} silos, {at.users} users, {at.coordinates} coordinates, "
                f"N_max {at.max_records_per_user}",
                f"{plain:.1f}",
                f"{packed:.1f}",
                f"{plain / packed:.0f}",
                f"{at.coordinates * at.ciphertext_bytes / cost.upload:.1f}",
                f"{cost.error:.1e}",
            )
        )
    header = ("round", "plain, s", "here, s", "times as fast")
    return table((*header, "upload, times smaller", "largest error"), rows) + "\n"


def plain_seconds(key: PrivateKey, settings: PaillierSettings, coordinates: int) -> float:
    """Return a plain round's time with phe, extrapolated from a few coordinates of one silo."""
    public = phe.PaillierPublicKey(int(key.public.n))
    private = phe.PaillierPrivateKey(public, int(key.p), int(key.q))
    users = min(settings.users, 20)
    numbers = [secrets.randbelow(public.n) for _ in range(users)]
    ciphertexts, encrypting = timed(lambda: [public.raw_encrypt(x) for x in numbers])
    encrypted = [phe.EncryptedNumber(public, ciphertext) for ciphertext in ciphertexts]

    def multiply() -> int:
        for _ in range(coordinates * settings.users // users):
            total = 1
            for number in encrypted:  # update · n_su · r_u · C_LCM modulo n has full length
                power = number._raw_mul(secrets.randbelow(public.n))
                total = encrypted[0]._raw_add(total, power)
        return total

    total, multiplying = timed(multiply)
    _, decrypting = timed(lambda: [private.raw_decrypt(total) for _ in range(10)])
    return (
        multiplying * (settings.silos * settings.coordinates / coordinates)
        + encrypting * (settings.users / users)
        + decrypting * (settings.coordinates / 10)
    )


def growth(settings: PaillierSettings, key: PrivateKey, scale: Scale) -> str:
    """Return a table of seconds as coordinates or users grow."""
    sizes = [replace(settings, coordinates=count) for count in scale.growth]
    sizes += [replace(settings, users=count) for count in scale.users]
    rows = []
    for at in sizes:
        cost = Parties(at, key).round(1)
        seconds = (f"{cost.silos / at.silos:.2f}", f"{cost.server:.2f}")
        rows.append((at.users, at.coordinates, *seconds))
    return table(("users", "coordinates", "one silo, s", "server, s"), rows)


if __name__ == "__main__":
    main()
