"""What every app does around its strategy: a run directory, its outcome, its report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.serverapp.strategy import Result

from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.reporting import RunDirectory, new_run_path, write_report
from flower_ext.reporting.run import Status


@contextmanager
def recorded_run(config: UserConfig, name: str) -> Iterator[RunDirectory]:
    """A new run directory and, after the block, its report; a failure is recorded, then raised.

    Parameters
    ----------
    config : UserConfig
        The run configuration; its ``run-directory`` names the directory, where it is not empty.
    name : str
        Part of the directory's name otherwise, in ``FLOWER_EXT_RUNS`` or ``./runs``.
    """
    if config.get("run-directory"):
        path = Path(str(config["run-directory"])).expanduser().absolute()
    else:
        root = Path(os.environ.get("FLOWER_EXT_RUNS", "runs")).absolute()
        path = new_run_path(root, name, datetime.now(UTC))
    run = RunDirectory.create(path, config=config)
    try:
        yield run
    except BaseException as error:
        run.finish("failed", f"{type(error).__name__}: {error}")
        raise
    print(f"Report: {write_report(run)}", flush=True)


def save_outcome(run: RunDirectory, strategy: FederatedStrategy, result: Result) -> None:
    """The final model, what protects people, and how each client fared."""
    run.save_model(result.arrays.to_torch_state_dict())
    run.save_guarantees(strategy.guarantees())
    run.save_client_metrics(
        [{"partition": i, **scores} for i, scores in sorted(strategy.client_metrics.items())]
    )
    status: Status = "budget-exhausted" if strategy.stopped else "completed"
    run.finish(status, strategy.stopped, refused=len(strategy.refusals))


def settings_of(context: Context) -> UserConfig:
    """The run's configuration; a node's owner says where its data are.

    A ``data-folder`` in the node config (``--node-config "data-folder='/path'"``) takes the place
    of the run's.
    """
    own = context.node_config.get("data-folder")
    return context.run_config if own is None else {**context.run_config, "data-folder": own}


def choice(config: UserConfig, name: str, allowed: tuple[str, ...]) -> str:
    """A configured word.

    Raises
    ------
    ValueError
        It is none of the allowed ones, which the message lists.
    """
    value = str(config[name])
    if value not in allowed:
        raise ValueError(f"run-config {name}={value!r}: expected one of {', '.join(allowed)}")
    return value
