"""Runs that may die in a round and continue in a new strategy, as in a new process."""

from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from safetensors.numpy import load_file

from flower_ext.algorithms import DP2FedSAM
from flower_ext.federation import InProcessGrid, first_config, record, recorded_run
from flower_ext.privacy import Budget, PoissonSampling
from flower_ext.runs import RunDirectory
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.worlds import task

CLIENTS = 4
plan = partial(release_plan, CLIENTS, sampling=PoissonSampling(CLIENTS, 0.7), rounds=5, delta=0.01)


class Died(BaseException):
    """The simulated end of the process; the package must not catch it."""


def play(
    folder: Path,
    *,
    rounds: int = 5,
    dies_in: int | None = None,
    at: str = "answers",
    method=DP2FedSAM,
    ledger: bool = True,
    memory: bool = True,
    budget: Budget | None = None,
    run_budget: Budget | None = None,
    engine: type[InProcessGrid] | None = None,
    **options,
):
    """Start a run once; in round ``dies_in`` it dies, after the requests or after the replies.

    ``budget`` is the ledger's, and ``run_budget`` the strategy's. ``engine`` is a `DyingGrid`.
    """
    facts = {"seed": 1, "seeded_noise": True, "plan": plan(), "evaluate_every": 2, **options}
    config = {
        "run-directory": str(folder / "run"),
        "resume": True,
        "rounds": rounds,
        "seeded": facts["seeded_noise"],
    }
    with recorded_run({**config, "rounds": first_config(config)["rounds"]}, "toy") as run:
        ledger = run.open_ledger(budget=budget) if ledger else None
        strategy = strategy_of(method, directory=run, ledger=ledger, budget=run_budget, **facts)
        settings = {"state-folder": str(folder / "state")} if memory else {}
        grid = (engine or DyingGrid)(
            strategy.method.client_app(task(), allow_seeded_noise=True), CLIENTS, settings
        )
        grid.dies_in, grid.at = dies_in, at
        record(run, strategy, grid, ArrayRecord(task().initial_params(0)), num_rounds=rounds)
    return RunDirectory.open(folder / "run"), strategy


def assert_same_model(one: RunDirectory, other: RunDirectory) -> None:
    """Assert that two runs end with the same model, bit for bit."""
    models = [load_file(run.path / "model.safetensors") for run in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, array in models[0].items():
        np.testing.assert_array_equal(array, models[1][name], err_msg=name)


class DyingGrid(InProcessGrid):
    dies_in: int | None = None
    at = "answers"

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        kind = messages[0].metadata.message_type if messages else ""
        dying = kind.startswith("train") and messages[0].metadata.group_id == str(self.dies_in)
        if dying and self.at == "questions":
            raise Died
        answers = super().send_and_receive(messages, timeout=timeout)
        if dying:
            raise Died
        return answers
