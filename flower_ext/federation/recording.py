"""Record the run of a strategy: open a run directory first, and write outcome and report last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext import runs
from flower_ext.errors import InvalidValue
from flower_ext.federation.query_round import use_records
from flower_ext.federation.run_files import attach
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.runs import RunDirectory, RunWriter, new_run_path
from flower_ext.runs.callbacks import Callback, Callbacks
from flower_ext.runs.directory import RUNS_VARIABLE, Status
from flower_ext.runs.settings import INCIDENTAL, Settings, UnfitSetting

log = getLogger("flwr")

AppSettings = TypeVar("AppSettings", bound=Settings)

CHANGEABLE = INCIDENTAL | {"rounds"}
"""Settings that may change when a run is resumed: its end, its paths and its timeouts."""


def first_config(config: UserConfig) -> UserConfig:
    """Return ``config``; for a resumed run, with the ``rounds`` with which that run began.

    A resumed run may have more rounds than that, but its noise is calibrated for that number.
    `recorded_run` checks that no other setting differs.
    """
    if (path := _path_to_resume(config)) is None:
        return config
    return {**config, "rounds": RunDirectory.open(path).config["rounds"]}


@contextmanager
def recorded_run(
    config: UserConfig, name: str, callbacks: Sequence[Callback] = ()
) -> Iterator[RunWriter]:
    """Open a run directory for the block; after the block, write the report.

    If the block fails or is interrupted, the function records that, writes a report of the rounds
    so far, and raises the error again. If ``resume`` is set and ``run-directory`` holds a run, that
    run continues.

    Parameters
    ----------
    config : UserConfig
        The run configuration; its ``run-directory`` names the directory, if it is not empty.
    name : str
        Part of the directory's name if ``run-directory`` is empty. The directory is then in the
        folder ``FLOWER_EXT_RUNS``, or in ``./runs``.
    callbacks : Sequence[Callback]
        User code to call when the run begins, after each round, and when it ends.

    Raises
    ------
    UnfitSetting
        The run to continue began with different settings; the message names them.
    """
    following = Callbacks(callbacks)
    run = _opened(config, name)
    log.info("Run directory: %s", run.path)

    def follow(server_round: int, row: Mapping[str, float]) -> None:
        following.tell(lambda callback: callback.round(run, server_round, dict(row)))

    run.on_round = follow
    try:
        following.tell(lambda callback: callback.begin(run))
        yield run
    except BaseException as error:
        _note_failure(run, error)
        raise
    else:
        _report(run)
    finally:
        following.tell(lambda callback: callback.end(run))
        run.close()


def _opened(config: UserConfig, name: str) -> RunWriter:
    path = _path_to_resume(config)
    if path is not None:
        _check_same(config, RunDirectory.open(path).config, path)
        return RunWriter.resume(path)
    new = _named(config) or new_run_path(runs_folder(), name, datetime.now(UTC))
    return RunWriter.create(new, config=config)


def runs_folder() -> Path:
    """Return the folder for new run directories: ``FLOWER_EXT_RUNS``, or ``./runs``."""
    return Path(os.environ.get(RUNS_VARIABLE, "runs")).expanduser().absolute()


def _note_failure(run: RunWriter, error: BaseException) -> None:
    try:
        # If a resumed run refuses a value before it finishes a round, the run keeps its former
        # status.
        if run.resumed and isinstance(error, InvalidValue) and run.withdraw():
            return
        run.finish("failed", _reason(error))
        if run.metrics():
            _report(run)
    except Exception as another:  # it must not hide the error that ended the run
        log.error("the failure of the run could not be recorded in its directory: %s", another)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"the run was interrupted by {error or 'Ctrl-C'}"
    if isinstance(error, SystemExit):
        return "the run was stopped"
    return f"{type(error).__name__}: {error}"


def _report(run: RunWriter) -> None:
    print(f"Report: {runs.write_report(run)}", flush=True)


def _named(config: UserConfig) -> Path | None:
    path = config.get("run-directory")
    return Path(str(path)).expanduser().absolute() if path else None


def _path_to_resume(config: UserConfig) -> Path | None:
    """Return the directory of the run to continue; None if a new run begins."""
    if not config.get("resume", False):
        return None
    path = _named(config)
    if path is None:
        raise UnfitSetting(
            "run-config resume=true without run-directory: expected the run's path as run-directory"
        )
    return path if (path / "run.json").is_file() else None


def _check_same(config: UserConfig, first: UserConfig, path: Path) -> None:
    # The app may have gained a setting since the run began. An empty or zero value turns it off,
    # and leaves the run as it was.
    gained = {name for name in config if name not in first and not config[name]}
    names = sorted((set(config) | set(first)) - CHANGEABLE - gained)
    differing = [
        f"{name}={config.get(name)!r} (it began with {first.get(name)!r})"
        for name in names
        if config.get(name) != first.get(name)
    ]
    if differing:
        raise UnfitSetting(
            f"the run in {path} cannot continue with different settings: {', '.join(differing)}; "
            "set them as they were, or begin a new run"
        )


def base_of(strategy: Strategy) -> FederatedStrategy:
    """Return the strategy that records a run: ``strategy`` itself, or the one that it wraps.

    Raises
    ------
    InvalidValue
        Neither is a strategy of this package.
    """
    base = getattr(strategy, "base", strategy)
    if not isinstance(base, FederatedStrategy):
        raise InvalidValue(
            f"strategy={type(base).__name__}: expected a FederatedStrategy, which "
            "records its run; wrap Flower's strategies in Hosted, or call the strategy's own start"
        )
    return base


def record(
    run: RunWriter,
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    **options: Any,
) -> Result:
    """Run a strategy, or a wrapper with a ``base``, and record the run in a directory.

    During the run, the directory receives metrics and checkpoints. After the run, it receives the
    final model, the records from which clients build their own models, the guarantees and the
    clients' scores. If the plan releases noised sums and the strategy has no ledger yet, the
    directory receives the ledger, too. ``options`` are those of ``strategy.start``.

    Raises
    ------
    InvalidValue
        The strategy is not of this package, writes to another run directory, or has run already.
    """
    base = base_of(strategy)
    if base.run.checkpoints.directory is not run:
        attach(base.run, run)
    result = strategy.start(grid, initial_arrays, **options)
    run.save_model(result.arrays.to_torch_state_dict())
    run.save_client_metrics(
        [{**scores, "partition": i} for i, scores in sorted(base.client_metrics.items())]
    )
    requests = use_records(base.run)
    run.save_use(
        {
            "method": base.method.client.name,
            "clients": base.run.population.num_nodes,
            "records": {name: dict(record) for name, record in requests.items()},
            "remembered": base.run.remembered,
            "frozen": base.run.frozen,
        }
    )
    status: Status = "budget-exhausted" if base.stopped else "completed"
    run.finish(status, base.stopped, refused=len(base.refusals))
    return result


def settings_of(kind: type[AppSettings], context: Context) -> AppSettings:
    """Return the run's settings, with the paths that the node's owner sets for this node.

    The node config (``--node-config "data-folder='/path'"``) overrides the run's ``data-folder``,
    and its ``draw-key`` if the app has this setting.
    """
    node, config = context.node_config, dict(context.run_config)
    if "data-folder" in node:
        config["data-folder"] = node["data-folder"]
    if "draw-key" in node and "draw-key" in config:
        config["draw-key"] = node["draw-key"]
    return kind.of(config)
