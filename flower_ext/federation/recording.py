"""Record the run of a strategy: open a run directory first, and write outcome and report last."""

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
from flower_ext.federation._flower_private import sent_with_app
from flower_ext.federation.server.query_round import use_records
from flower_ext.federation.server.run_terms import check_same, terms_of
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.files import read_toml
from flower_ext.runs import RunDirectory, RunWriter, new_run_path
from flower_ext.runs.callbacks import Callback, Callbacks
from flower_ext.runs.directory import RUNS_VARIABLE, Status
from flower_ext.runs.settings import INCIDENTAL, Settings, UnfitSetting

log = getLogger("flwr")

AppSettings = TypeVar("AppSettings", bound=Settings)

CHANGEABLE = INCIDENTAL | {"rounds"}
"""Settings that may change when a run is resumed: its end, its paths and its timeouts."""


def first_config(config: UserConfig) -> UserConfig:
    """Return ``config``; in a resumed run, set ``rounds`` to the number with which the run began.

    A resumed run may have more rounds, but its noise is calibrated for that first number.
    `recorded_run` refuses a change of any setting that is not in `CHANGEABLE`.
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
    if (path := _path_to_resume(config)) is None:
        path = _named(config) or new_run_path(_runs_folder(), name, datetime.now(UTC))
        directory = RunWriter.create(path, config=config)
    else:
        check_same(path, RunDirectory.open(path).config, config, free=CHANGEABLE)
        directory = RunWriter.resume(path)
    log.info("Run directory: %s", directory.path)
    _warn_if_sent(directory.path)

    def follow(server_round: int, row: Mapping[str, float]) -> None:
        following.tell(lambda callback: callback.round(directory, server_round, dict(row)))

    directory.on_round = follow
    try:
        following.tell(lambda callback: callback.begin(directory))
        yield directory
    except BaseException as error:
        _note_failure(directory, error)
        raise
    else:
        _report(directory)
    finally:
        following.tell(lambda callback: callback.end(directory))
        directory.close()


def _runs_folder() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE, "runs")).expanduser().absolute()


def _warn_if_sent(path: Path) -> None:
    """Warn if the run directory lies in an app's folder, with which Flower would send its files."""
    for app in path.parents:
        try:
            settings = read_toml(app / "pyproject.toml")["tool"]["flwr"]["app"]
        except (InvalidValue, KeyError, TypeError):  # no app's folder
            continue
        if sent_with_app(app, path / "ledger.jsonl", settings.get("fab-exclude", [])):
            log.warning(
                "the run directory lies in the folder of a Flower app: the next run would send its "
                "ledger, metrics and guarantees to every node, although guarantees assume that "
                "they stay on the server. Add the line /%s/ to %s, or set %s to another folder",
                path.relative_to(app).parts[0],
                app / ".gitignore",
                RUNS_VARIABLE,
            )
        return


def _note_failure(directory: RunWriter, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        reason = f"the run was interrupted by {error or 'Ctrl-C'}"
    elif isinstance(error, SystemExit):
        reason = "the run was stopped"
    try:
        # If a resumed run refuses a value before it finishes a round, the run keeps its former
        # status.
        if directory.resumed and isinstance(error, InvalidValue) and directory.withdraw():
            return
        directory.finish("failed", reason)
        if directory.metrics():
            _report(directory)
    except Exception as another:  # it must not hide the error that ended the run
        log.error("the failure of the run could not be recorded in its directory: %s", another)


def _report(directory: RunWriter) -> None:
    print(f"Report: {runs.write_report(directory)}", flush=True)


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


def _base_of(strategy: Strategy) -> FederatedStrategy:
    """Return the strategy that records a run: ``strategy`` itself, or the one that it wraps."""
    base = getattr(strategy, "base", strategy)
    if not isinstance(base, FederatedStrategy):
        raise InvalidValue(
            f"strategy={type(base).__name__}: expected a FederatedStrategy, which "
            "records its run; wrap Flower's strategies in Hosted, or call the strategy's own start"
        )
    return base


def record(
    directory: RunWriter,
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    **options: Any,
) -> Result:
    """Run a strategy, or a wrapper with a ``base``, and record the run in a directory.

    During the run, the directory receives metrics and checkpoints. After the run, it receives the
    final model, the message records from which clients build their own models, the guarantees and
    the clients' scores. If the plan releases noised sums and the strategy has no ledger yet, the
    directory receives the ledger, too. ``options`` are those of ``strategy.start``.

    Raises
    ------
    InvalidValue
        The strategy is not of this package, writes to another run directory, or has run already.
    """
    base = _base_of(strategy)
    if base.run.directory is not directory:
        base.record_in(directory)
    result, run = strategy.start(grid, initial_arrays, **options), base.run
    directory.save_model(result.arrays.to_torch_state_dict())
    directory.save_client_metrics(
        [{**scores, "partition": i} for i, scores in sorted(run.client_metrics.items())]
    )
    directory.save_use(
        {
            "method": run.method.client.name,
            "clients": run.population.num_nodes,
            "records": {name: dict(record) for name, record in use_records(run).items()},
            "remembered": run.remembered,
            "frozen": run.options.frozen,
        }
    )
    status: Status = "budget-exhausted" if run.stopped else "completed"
    directory.finish(status, run.stopped, refused=run.clients.refused)
    return result


def node_settings(kind: type[AppSettings], context: Context) -> AppSettings:
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


class recorded:
    """Give a strategy a run directory, so that its ``start`` records the run and can resume it.

    Use it in any ServerApp; the app needs no settings of this package::

        strategy = FederatedStrategy(DPFedAvg(), plan)
        result = recorded(strategy, "my-run").start(grid, arrays, num_rounds=60)

    The directory holds settings, metrics of every round, checkpoints, the ledger of a
    `ReleasePlan`, guarantees, the final model, each client's scores, and a report. It also records
    a failure or an interruption.

    A name stands for one run. If that run was killed, was interrupted or failed, the next start
    continues it after its last finished round. If the run is complete, a start with a higher
    ``num_rounds`` continues it, too. Without a name, every start creates a new directory.

    Parameters
    ----------
    strategy : Strategy
        A `FederatedStrategy`, or `Upcycled` around one, without ``directory=`` and ``ledger=``.
    name : str or Path
        Path of the directory. A relative path lies in the folder that the environment variable
        ``FLOWER_EXT_RUNS`` names, by default ``./runs``. Under ``flwr run`` the current folder is
        that of the SuperLink: look for the line ``Run directory:`` in the log. If the name is
        empty, the method and the time name the directory.
    callbacks : Sequence[Callback]
        User code to call when the run begins, after each round, and when it ends.

    Raises
    ------
    InvalidValue
        The strategy is not of this package: run Flower's strategies inside `Hosted`.
    """

    def __init__(
        self, strategy: Strategy, name: str | Path = "", *, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.strategy = strategy
        self.directory: RunWriter | None = None
        """The directory of the last start; None before the first."""
        self._base = _base_of(strategy)
        self._path = _runs_folder() / Path(name).expanduser() if str(name) else None
        self._callbacks = callbacks

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **options: Any
    ) -> Result:
        """Run up to round ``num_rounds`` and record the run, or continue the directory's run.

        Parameters
        ----------
        num_rounds : int
            Number of the last round, counted from the beginning of the run.
        **options
            Further options of ``strategy.start``.

        Raises
        ------
        UnfitSetting
            The directory holds a run with a different plan, model or strategy. The message names
            the differences.
        InvalidValue
            The directory holds a complete run of ``num_rounds`` or more rounds, or other files.
        InUse
            Another process writes to the directory.
        """
        config = {
            **terms_of(self._base.run, self.strategy),
            "rounds": num_rounds,
            "parameters": sum(array.numpy().size for array in initial_arrays.values()),
        }
        if self._path is not None:
            if (self._path / "run.json").is_file():
                run = RunDirectory.open(self._path)
                done = int(run.metrics().last)
                if run.status == "completed" and num_rounds <= done:
                    raise InvalidValue(
                        f"{self._path} holds a run that is complete, after {done} rounds: for a "
                        "new run, give recorded(...) a different name, or no name; to continue "
                        f"this run, replace num_rounds={num_rounds} by a number above {done}"
                    )
            config |= {"run-directory": str(self._path), "resume": True}
        with recorded_run(config, config["method"], self._callbacks) as directory:
            self.directory = directory
            return record(
                directory, self.strategy, grid, initial_arrays, num_rounds=num_rounds, **options
            )
