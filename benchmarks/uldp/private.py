"""Time of whole runs of ULDP-AVG with private weights: set-up, training, encryption, decryption.

    python -m benchmarks.uldp.private heart-disease tcga-brca
    python -m benchmarks.uldp.private mnist --rounds 1
    python -m benchmarks.uldp.private mnist --protocol lattice --silo-limit 200

A run is that of ``apps/uldp-fl`` in this process, silo by silo, over Paillier with 3072-bit keys
and N_max = 2000, or over ring-LWE. It reads data from FLOWER_EXT_DATA, and compares every run with
``uldp-avg-w`` under the same seeded noise. Over Paillier, a new process for every message would
make the tables in every round, as ``sampled`` does, because its encryptions are fresh.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from torch.nn.functional import cross_entropy

from benchmarks.uldp.app import describe_silos, load_silos
from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
    silo_training,
    theory_learning_rate,
    weighted_sum,
)
from flower_ext.federation import FederatedStrategy, InProcessGrid, records
from flower_ext.federation.sums.weighted import WeightedSum, cores
from flower_ext.metrics import concordance_index
from flower_ext.privacy import FullParticipation, PoissonSampling, ReleasePlan
from flower_ext.runs.page import table
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_silo import PaillierSilo
from flower_ext.secure.weighting.protocol import WeightingProtocol
from flower_ext.training import LocalTraining, Task, accuracy, cox_loss
from flower_ext.training.models import build
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.silo import LatticeSilo
from flower_ext_lattice.weighing import Weighing
from flower_ext_lattice.weighting import LatticeWeighting

PARTS = ("set-up", "training", "encryptions", "silos", "decryption", "rest")
LOCAL = LocalTraining(epochs=2, batch_size=32, learning_rate=0.2)


@dataclass
class Clock:
    """Seconds of every part, of the set-up and of each round."""

    now: Callable[[], float]
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of the runs in the ``with`` block."""
        spots: tuple[tuple[Any, str, str], ...] = (
            (UldpAvg, "connect", "set-up"),
            (WeightedSum, "connect", "set-up"),
            (PaillierServer, "_encrypt", "encryptions"),
            (PaillierSilo, "_draw_receiver", "silos"),
            (PaillierSilo, "weigh", "silos"),
            (PaillierServer, "close_round", "decryption"),
            (LatticeServer, "_encrypt", "encryptions"),
            (LatticeSilo, "open_sum", "silos"),
            (Weighing, "add", "silos"),
            (Weighing, "finish", "silos"),
            (LatticeServer, "close_round", "decryption"),
            (silo_training, "users_updates", "training"),
        )
        kept = [getattr(owner, name) for owner, name, _ in spots]
        for (owner, name, part), work in zip(spots, kept, strict=True):
            setattr(owner, name, self.timed(work, part))
        try:
            yield
        finally:
            for (owner, name, _), work in zip(spots, kept, strict=True):
                setattr(owner, name, work)

    def timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return ``work`` with its seconds counted for ``part``."""

        def watched(*args: Any, **options: Any) -> Any:
            started = self.now()
            result = work(*args, **options)
            if part == "training":
                result = list(result)
            self.seconds[part] += self.now() - started
            return result

        return watched


def main() -> None:
    """Print a table for each data set."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uldp.private",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dataset", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, help="the data set's default")
    parser.add_argument("--protocol", choices=("paillier", "lattice"), default="paillier")
    parser.add_argument("--silo-limit", type=int, help="lattice: most records of a user in a silo")
    parser.add_argument("--key-bits", type=int, default=3072)
    parser.add_argument("--max-records", type=int, default=2000)
    parser.add_argument("--sampled", type=float, default=1.0, help="rate at which users are drawn")
    parser.add_argument("--draw-choices", type=int, help="draw them by oblivious transfer")
    parser.add_argument("--cpu", action="store_true", help="seconds of all cores, not of the clock")
    arguments = parser.parse_args()
    for dataset in arguments.dataset:
        report(dataset, arguments)


def report(dataset: str, arguments: argparse.Namespace) -> None:
    """Run one data set with private and with plain weights."""
    info = describe_silos(dataset)
    users = arguments.users or info.num_users
    task = task_of(dataset, users)
    protocol: WeightingProtocol = PrivateWeighting(
        key_bits=arguments.key_bits,
        max_records_per_user=arguments.max_records,
        draw_choices=arguments.draw_choices,
        allow_insecure_key_size=arguments.key_bits < 3072,
    )
    if arguments.protocol == "lattice":
        protocol = LatticeWeighting(
            max_records_per_user=arguments.silo_limit or arguments.max_records
        )
    rate = arguments.sampled
    plan = ReleasePlan(
        sampling=FullParticipation(users) if rate == 1 else PoissonSampling(users, rate),
        clipping_norm=0.1,
        noise_multiplier=5.0,
        rounds=arguments.rounds,
        delta=1e-5,
    )
    method = UldpAvg(
        num_silos=info.num_silos,
        weighting="by-records",
        local=LOCAL,
        server_learning_rate=theory_learning_rate(
            num_silos=info.num_silos, num_users=users, epochs=LOCAL.epochs
        ),
    )
    options: dict[str, Any] = {"seed": 1, "seeded_noise": True, "evaluate_every": 0}
    strategy = FederatedStrategy(method, plan, sum=weighted_sum(protocol), **options)
    rounds, found = timed_rounds(method, strategy, task, arguments.rounds, cpu=arguments.cpu)
    parameters = sum(array.size for array in found.values())
    print(
        f"\n{dataset}: {info.num_silos} silos, {users} users, {parameters} parameters, "
        f"{protocol}, {cores()} threads"
        + (", processor seconds" if arguments.cpu else "")
    )
    header = ("round", *(f"{part}, s" for part in PARTS), "all, s", "MB up", "MB down")
    print(table(header, rounds))
    if rate == 1:
        plain = FederatedStrategy(method, plan, **options)
        _, expected = timed_rounds(method, plain, task, arguments.rounds, cpu=arguments.cpu)
        error = max(float(np.abs(found[n] - expected[n]).max()) for n in expected)
        print(f"Largest difference to the model of plain weights (float32): {error:.1e}")


def timed_rounds(
    method: UldpAvg, strategy: FederatedStrategy, task: Task, rounds: int, *, cpu: bool
) -> tuple[list[Sequence[object]], records.Arrays]:
    """Return a row of seconds and megabytes for each round, and the final model."""
    clock = Clock(time.process_time if cpu else time.perf_counter)
    rows: list[Sequence[object]] = []
    started = clock.now()

    def after(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal started
        if number == 0:
            return None
        whole = clock.now() - started
        known = {part: clock.seconds[part] for part in PARTS if part != "rest"}
        known["rest"] = whole - sum(known.values())
        row = strategy.run.progress.row
        up = row["bytes_up"] + row.get("query_bytes_up", 0)
        down = row["bytes_down"] + row.get("query_bytes_down", 0)
        seconds = [f"{known[part]:.2f}" for part in PARTS]
        rows.append((number, *seconds, f"{whole:.2f}", f"{up / 1e6:.2f}", f"{down / 1e6:.2f}"))
        clock.seconds.clear()
        started = clock.now()
        return None

    app = method.client_app(task, allow_seeded_noise=True)
    grid = InProcessGrid(app, num_clients=method.num_silos)
    initial = ArrayRecord(task.initial_params(1))
    with clock.watching():
        result = strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=after)
    return rows, records.to_arrays(result.arrays)


def task_of(dataset: str, users: int) -> Task:
    """Return the data set's model and loss, on the paper's uniform allocation."""
    info = describe_silos(dataset)
    silos = load_silos(dataset, num_users=users, seed=1)
    survival = dataset.startswith("tcga-brca")
    return Task(
        model=lambda: build(info.model, num_classes=info.num_classes),
        data=lambda silo: silos[silo],
        loss=cox_loss if survival else cross_entropy,
        metrics={"concordance": concordance_index} if survival else {"accuracy": accuracy},
    )


if __name__ == "__main__":
    main()
