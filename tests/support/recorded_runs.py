"""Small runs by ``recorded``, as in a ServerApp, which may die in a round."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import recorded
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining
from tests.support.dying_runs import Died, DyingGrid
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.worlds import task

CLIENTS = 3
plan = partial(release_plan, CLIENTS, noise_multiplier=3.0, rounds=4, delta=0.01)


def play(
    name: str | Path,
    *,
    rounds: int = 4,
    dies_in: int | None = None,
    at: str = "answers",
    callbacks: Sequence = (),
    wrap=lambda strategy: strategy,
    model=None,
    method=DPFedAvg,
    **options,
):
    """Start a run once; return its directory, strategy and result (None if the run dies)."""
    settings = {"plan": plan(), "local": LocalTraining(epochs=1), "timeout": 5.0, **options}
    strategy = strategy_of(method, **settings)
    grid = DyingGrid(method.client_app(task(), allow_seeded_noise=True), CLIENTS, {})
    grid.dies_in, grid.at = dies_in, at
    start = recorded(wrap(strategy), name, callbacks=callbacks)
    initial = ArrayRecord(model or task().initial_params(0))
    result = None
    with suppress(Died):
        result = start.start(grid, initial, num_rounds=rounds)
    assert (result is None) == (dies_in is not None)
    return RunDirectory.open(start.directory.path), strategy, result
