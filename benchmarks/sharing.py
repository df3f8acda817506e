"""When sharing pays: clients alone beside shared training at ε = 2, by their number and data.

    python -m benchmarks sharing --data-folder DATA --output RESULTS

A cell is a number of clients, of examples a client and of classes a client. All methods train one
small network on MNIST at 14×14 pixels, from the same start. A client tests on other images of its
classes. In every cell, test accuracy under a seed of its own chooses a method's settings. Finished
cells in the output folder are kept, and cells that need more images than there are do not run.
``--dataset digits`` needs no data folder, but its images suffice for a few small cells only.
"""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn.functional import avg_pool2d

from benchmarks.command_line import experiment_parser
from benchmarks.report.rows import Row, read_rows, select_rows, store_rows
from benchmarks.report.tables.sharing import private_gains
from benchmarks.runs import SEARCH_SEED
from flower_ext.algorithms import DP2FedSAM, DPDitto, DPFedAvg
from flower_ext.data import ClientData, Examples, datasets
from flower_ext.federation import FederatedStrategy, InProcessGrid, Method
from flower_ext.files import write_rows
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyPlan,
    ReleasePlan,
)
from flower_ext.runs.figures import Chart, Line, draw_lines
from flower_ext.training import LocalTraining, Task

CLASSES, HIDDEN, BATCH = 10, 32, 10
ROUNDS, SAMPLING_RATE, EPSILON, DELTA = 40, 0.1, 2.0, 1e-5
TEST_IMAGES = 20_000
"""Test images of all clients together; several clients may test on the same image."""
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "alone": {"learning_rate": (0.1, 0.3)},
    "FedAvg": {"learning_rate": (0.1, 0.3)},
    "DP-FedAvg": {"learning_rate": (0.3,), "clipping_norm": (0.3, 1.0)},
    "DP²-FedSAM": {"learning_rate": (0.3,), "clipping_norm": (0.3, 1.0)},
}
"""Methods, and the values of their settings to search."""
LARGEST_SHARE = 0.9
"""Share of the training images that a cell may need; the classes are not equally large."""
COLUMNS = ("clients", "examples", "classes", "method", "settings", "seed", "accuracy", "epsilon")


@dataclass(frozen=True)
class Cell:
    """A population: its number of clients, and of training examples and classes of each."""

    clients: int
    examples: int
    classes: int

    @property
    def name(self) -> str:
        """The three numbers, for the name of a file."""
        return f"{self.clients}-{self.examples}-{self.classes}"


def build(pixels: int) -> nn.Sequential:
    """Return the network: an extractor of one layer, and a head."""
    extractor = nn.Sequential(nn.Flatten(), nn.Linear(pixels, HIDDEN), nn.ReLU())
    model = nn.Sequential()
    model.add_module("extractor", extractor)
    model.add_module("head", nn.Linear(HIDDEN, CLASSES))
    return model


def split_examples(name: str, folder: Path | None) -> tuple[Examples, Examples]:
    """Return training and test examples, six to one; large images at half their resolution."""
    data = datasets.load(name, folder)
    images = data.features if data.features.shape[-1] < 28 else avg_pool2d(data.features, 2)
    order = np.random.default_rng(0).permutation(len(data))
    both = Examples(images, data.targets)
    cut = len(order) * 6 // 7
    return both.subset(order[:cut]), both.subset(order[cut:])


def deal_clients(cell: Cell, train: Examples, test: Examples, seed: int) -> list[ClientData]:
    """Deal examples to clients: no training image twice, and each class to equally many clients.

    Raises
    ------
    IndexError
        A class has too few training images.
    """
    rng = np.random.default_rng(seed)
    unused, tests = (
        [[*rng.permutation(np.flatnonzero(part.targets.numpy() == c))] for c in range(CLASSES)]
        for part in (train, test)
    )
    count = TEST_IMAGES // cell.clients
    deck: list[int] = []
    clients = []
    for _ in range(cell.clients):
        deck = deck or [*rng.permutation(CLASSES)]
        classes, deck = deck[: cell.classes], deck[cell.classes :]
        labels = [classes[i % cell.classes] for i in range(max(cell.examples, count))]
        chosen = [unused[label].pop() for label in labels[: cell.examples]]
        test_images = [rng.choice(tests[label]) for label in labels[:count]]
        clients.append(ClientData(train=train.subset(chosen), test=test.subset(test_images)))
    return clients


def accuracy(
    method: str, settings: Mapping[str, float], clients: Sequence[ClientData], seed: int
) -> tuple[float, float]:
    """Return the mean accuracy of clients after training, and ε; NaN without a guarantee."""
    pixels = clients[0].train.features[0].numel()
    task = Task(model=partial(build, pixels), data=clients.__getitem__, device="cpu")
    rounds = 1 if method == "alone" else ROUNDS
    strategy = FederatedStrategy(
        method_of(method, settings["learning_rate"], len(clients[0].train)),
        plan_of(method, settings, len(clients)),
        evaluate_every=rounds,
        seed=seed,
    )
    grid = InProcessGrid(strategy.method.client_app(task), num_clients=len(clients))
    strategy.start(grid, ArrayRecord(task.initial_params(seed)), num_rounds=rounds)
    last = strategy.run.progress.row
    return last["accuracy_mean"], last.get("epsilon_provable", math.nan)


def method_of(name: str, learning_rate: float, examples: int) -> Method:
    """Return a method by its name in `GRIDS`, for clients of so many examples."""
    local = LocalTraining(epochs=2, batch_size=BATCH, learning_rate=learning_rate)
    if name == "alone":
        none = replace(local, epochs=0)
        alone = replace(local, steps=max(100, 4 * examples))  # 40 epochs, and at least 100 steps
        return DPDitto(global_weight=0.0, local=none, personal_training=alone)
    if name == "DP²-FedSAM":
        head, extractor = replace(local, epochs=5), replace(local, sam_radius=0.05)
        return DP2FedSAM(head=head, extractor=extractor, adapt_before_evaluation=True)
    return DPFedAvg(local=local)


def plan_of(name: str, settings: Mapping[str, float], clients: int) -> PrivacyPlan:
    """Return the plan of a method; a clipping norm among the settings asks for privacy."""
    if name == "alone":
        return NonPrivatePlan(sampling=FullParticipation(clients))
    cohorts = PoissonSampling(clients, SAMPLING_RATE)
    if "clipping_norm" not in settings:
        return NonPrivatePlan(sampling=cohorts)
    return ReleasePlan.for_target(
        epsilon=EPSILON,
        delta=DELTA,
        sampling=cohorts,
        rounds=ROUNDS,
        clipping_norm=settings["clipping_norm"],
        noise_placement="server",
    )


def measure_cell(cell: Cell, parts: tuple[Examples, Examples], seeds: int) -> list[list[Any]]:
    """Return a row for each method and seed, with the settings that the search found."""
    search_clients = deal_clients(cell, *parts, SEARCH_SEED)
    rows = []
    populations = {seed: deal_clients(cell, *parts, seed) for seed in range(1, seeds + 1)}
    for method, grid in GRIDS.items():
        trials = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        best = max(
            trials, key=lambda trial: accuracy(method, trial, search_clients, SEARCH_SEED)[0]
        )
        settings = " ".join(f"{name}={value:g}" for name, value in best.items())
        for seed, clients in populations.items():
            score, epsilon = accuracy(method, best, clients, seed)
            shown = "inf" if math.isnan(epsilon) else f"{epsilon:.3f}"
            row = [cell.clients, cell.examples, cell.classes, method, settings, seed]
            rows.append([*row, f"{score:.4f}", "" if method == "alone" else shown])
    return rows


def main() -> None:
    """Measure the cells that are missing in the output folder; keep the rows of all."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "digits"))
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--examples", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 10], choices=(2, 5, 10))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    parts = split_examples(
        arguments.dataset, Path(arguments.data_folder) if arguments.data_folder else None
    )
    for sizes in product(arguments.clients, arguments.examples, arguments.classes):
        cell = Cell(*sizes)
        path = folder / f"{arguments.dataset}-{cell.name}-{arguments.seeds}.csv"
        if cell.clients * cell.examples <= LARGEST_SHARE * len(parts[0]) and not path.exists():
            write_rows(path, COLUMNS, measure_cell(cell, parts, arguments.seeds))
            print(path, flush=True)
    files = sorted(folder.glob(f"{arguments.dataset}-*-{arguments.seeds}.csv"))
    rows = [row for path in files for row in read_rows(path.stem, folder=folder)]
    if arguments.dataset == "mnist":
        cells = [[row[name] for name in COLUMNS] for row in rows]
        store_rows("sharing", COLUMNS, cells, folder=folder)
        draw(rows, folder)


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw what sharing at ε = 2 gains over a client alone, by the number of examples a client."""
    lines: dict[str, Line] = {}
    for clients, classes in product(("100", "1000"), ("2", "10")):
        line = select_rows(rows, clients=clients, classes=classes)
        sizes = sorted({int(row["examples"]) for row in line})
        if sizes:
            values = [
                statistics.mean(private_gains(select_rows(line, examples=n))[1]) for n in sizes
            ]
            lines[f"{clients} clients, {classes} classes each"] = sizes, values
    chart = Chart(
        title="What sharing at ε = 2 gains over a client alone",
        xlabel="examples a client",
        ylabel="percentage points",
        lines={name: [line] for name, line in lines.items()},
    )
    draw_lines(folder, "sharing", chart)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    main()
