"""A whole app from the command line, beside an app as Flower's quickstart writes one.

    python -m benchmarks.speed.apps [--clients 50] [--rounds 10] [--turns 1]

Both average the models of all clients, with the same model, data, epochs and batches, without
privacy and without evaluation. `flower-ext run` starts every one of them; what is measured is the
command, from its start to its end, with all that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.runs.page import table

OURS = Path(__file__).parents[2] / "apps" / "dp2-fedsam"
EPOCHS, BATCH, LEARNING_RATE = 2, 16, 0.1

CLIENT = '''"""A plain PyTorch client."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from quickstart_app.task import task_of

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    task = task_of(context)
    model = task.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = task.data(int(context.node_config["partition-id"])).train
    config = context.run_config
    loader = DataLoader(
        TensorDataset(own.features, own.targets),
        batch_size=int(config["batch-size"]),
        shuffle=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["learning-rate"]))
    for _ in range(int(config["local-epochs"])):
        for features, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(own)}),
        }
    )
    return Message(content, reply_to=message)
'''
SERVER = '''"""Flower's FedAvg."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart_app.task import task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = task_of(context).model()
    clients = int(context.run_config["clients"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(grid, ArrayRecord(model.state_dict()), int(context.run_config["rounds"]))
'''


def main(
    clients: Annotated[int, typer.Option(help="all of them train in every round")] = 50,
    rounds: Annotated[int, typer.Option(help="rounds of a run")] = 10,
    turns: Annotated[int, typer.Option(help="runs of each command; the best counts")] = 1,
) -> None:
    """Print a table of seconds."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = quickstart(Path(folder))
        wanted = {
            "clients": clients,
            "rounds": rounds,
            "partition": "iid",
            "local-epochs": EPOCHS,
            "batch-size": BATCH,
            "learning-rate": LEARNING_RATE,
        }
        ours = {
            **wanted,
            "method": "fedavg",
            "weighting": "examples",
            "sampling": "everyone",
            "learning-rate-decay": 1.0,
            "evaluate-every": 0,
        }
        commands = {
            "Flower's quickstart, on Ray": command(theirs, {**wanted, "clients-per-node": 1}),
            "ours, on Ray": command(OURS, ours),
            "ours, in process": command(OURS, ours, "--in-process"),
        }
        best = dict.fromkeys(commands, float("inf"))
        for _ in range(turns):
            for name, words in commands.items():
                best[name] = min(best[name], seconds(words, Path(folder)))
    theirs_took = best["Flower's quickstart, on Ray"]
    rows = [(name, f"{took:.1f}", f"{theirs_took / took:.2f}") for name, took in best.items()]
    print(f"{clients} clients, {rounds} rounds\n")
    print(table(("command", "seconds", "times as fast"), rows))


def quickstart(folder: Path) -> Path:
    """Write the app, with the task of ours."""
    package = folder / "quickstart" / "quickstart_app"
    package.mkdir(parents=True)
    task = (OURS / "dp2_fedsam_app" / "task.py").read_text()
    settings = (OURS / "pyproject.toml").read_text().replace("dp2_fedsam_app", "quickstart_app")
    (package.parent / "pyproject.toml").write_text(
        settings.replace('name = "dp2-fedsam"', 'name = "quickstart"')
    )
    (package.parent / "LICENSE").write_text((OURS / "LICENSE").read_text())
    for name, text in (("__init__", ""), ("task", task), ("client_app", CLIENT)):
        (package / f"{name}.py").write_text(text)
    (package / "server_app.py").write_text(SERVER)
    return package.parent


def command(app: Path, settings: dict[str, object], *more: str) -> list[str]:
    """Return the words of a command."""
    said = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "flower_ext.cli.main", "run", str(app), *more, *said]


def seconds(words: list[str], folder: Path) -> float:
    """Run a command in a folder; seconds until its end."""
    started = time.perf_counter()
    done = subprocess.run(
        [*words, "--runs", str(folder / "runs")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took


if __name__ == "__main__":
    typer.run(main)
