"""What every app does around its strategy: a run directory, its outcome, its report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.serverapp.strategy import Result

from flower_ext import runs
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.privacy import Budget
from flower_ext.runs import RunDirectory, new_run_path
from flower_ext.runs.directory import Status
from flower_ext.runs.settings import INCIDENTAL, UnfitSetting, absolute_path, flag, number

log = getLogger("flwr")


CHANGEABLE = INCIDENTAL | {"rounds"}
"""Settings in which a start of a run may differ from the one before: its end, places, patience."""


def first_config(config: UserConfig) -> UserConfig:
    """The configuration that made the run's plan: ``config``, or the first of a resumed run.

    They differ in ``rounds`` alone, as `recorded_run` checks: noise is calibrated for the rounds
    that a run began with, however many are made in the end.
    """
    path = _path_to_resume(config)
    return config if path is None else {**config, "rounds": _first(path)["rounds"]}


@contextmanager
def recorded_run(config: UserConfig, name: str) -> Iterator[RunDirectory]:
    """A run directory and, after the block, its report; a failure is recorded, then raised.

    With ``resume`` set, the run in ``run-directory`` goes on, if there is one.

    Parameters
    ----------
    config : UserConfig
        The run configuration; its ``run-directory`` names the directory, where it is not empty.
    name : str
        Part of the directory's name otherwise, in ``FLOWER_EXT_RUNS`` or ``./runs``.

    Raises
    ------
    UnfitSetting
        The run that should go on began with other settings; the message names them.
    """
    path = _path_to_resume(config)
    if path is not None:
        _check_same(config, _first(path), path)
        run = RunDirectory.resume(path)
    elif config.get("run-directory"):
        run = RunDirectory.create(_named(config), config=config)
    else:
        root = Path(os.environ.get("FLOWER_EXT_RUNS", "runs")).absolute()
        run = RunDirectory.create(new_run_path(root, name, datetime.now(UTC)), config=config)
    log.info("Run directory: %s", run.path)
    try:
        yield run
    except BaseException as error:
        try:
            run.finish("failed", _reason(error))
            runs.write_report(run)
        except Exception as other:  # what ended the run is what counts
            log.error("the run directory does not say how the run failed: %s", other)
        raise
    finally:
        run.close()
    print(f"Report: {runs.write_report(run)}", flush=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"the run was interrupted by {error or 'Ctrl-C'}"
    if isinstance(error, SystemExit):
        return "the run was stopped"
    return f"{type(error).__name__}: {error}"


def shared_budget(config: UserConfig, own: Budget | None) -> Budget | None:
    """``own``, or the budget of all runs on the population whose account is ``budget-ledger``.

    Raises
    ------
    UnfitSetting
        A path that another folder would make another one, or no budget.
    """
    if config.keys().isdisjoint(("budget-ledger", "population-epsilon", "population-delta")):
        return own  # an app without such accounts; one that misspells the first has the others
    if (path := absolute_path(config, "budget-ledger")) is None:
        return own
    return Budget(
        epsilon=number(config, "population-epsilon", above=0),
        delta=number(config, "population-delta", above=0),
        ledger=path,
    )


def _named(config: UserConfig) -> Path:
    return Path(str(config["run-directory"])).expanduser().absolute()


def _path_to_resume(config: UserConfig) -> Path | None:
    """Where a run is that goes on; None if one begins."""
    if "resume" not in config or not flag(config, "resume"):
        return None
    if not config.get("run-directory"):
        raise UnfitSetting("run-config resume=true: expected the run's path as run-directory")
    path = _named(config)
    return path if (path / "run.json").is_file() else None


def _first(path: Path) -> UserConfig:
    return RunDirectory.open(path).config


def _check_same(config: UserConfig, first: UserConfig, path: Path) -> None:
    # A setting that the app has gained since, and that is empty or zero, was off in the older run.
    gained = {name for name in config if name not in first and not config[name]}
    names = sorted((set(config) | set(first)) - CHANGEABLE - gained)
    differing = [
        f"{name}={config.get(name)!r} (it began with {first.get(name)!r})"
        for name in names
        if config.get(name) != first.get(name)
    ]
    if differing:
        raise UnfitSetting(
            f"the run in {path} cannot go on with other settings: {', '.join(differing)}; set "
            "them as they were, or begin a new run"
        )


def save_outcome(run: RunDirectory, strategy: FederatedStrategy, result: Result) -> None:
    """The final model, how clients use it, what protects people, and how each client fared."""
    run.save_model(result.arrays.to_torch_state_dict())
    run.save_guarantees(strategy.guarantees())
    run.save_client_metrics(
        [{**scores, "partition": i} for i, scores in sorted(strategy.client_metrics.items())]
    )
    asked = strategy.evaluation_records()
    run.save_use(
        {
            "method": strategy.client.name,
            "clients": strategy.population.num_nodes,
            "records": {name: dict(record) for name, record in asked.items()},
            "remembered": strategy.remembered,
            "frozen": strategy.frozen,
        }
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
