"""Record the run of a strategy in any ServerApp, by one added line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.errors import InvalidValue
from flower_ext.federation.recording import base_of, record, recorded_run, runs_folder
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.privacy import Guarantee
from flower_ext.runs import RunDirectory, RunWriter
from flower_ext.runs.callbacks import Callback
from flower_ext.training import LocalTraining


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
        A `FederatedStrategy`, or `Upcycled` around one. Do not give the strategy
        ``run=`` or ``ledger=``.
    name : str or Path
        Path of the directory. A relative path lies in the folder that the environment variable
        ``FLOWER_EXT_RUNS`` names, by default ``./runs``. Under ``flwr run`` the current folder is
        that of the SuperLink: look for the line ``Run directory:`` in the log. If the name is
        empty, the method and the time name the directory.
    callbacks : Sequence[Callback]
        User code to call when the run begins, after each round, and when it ends.

    Attributes
    ----------
    run : RunWriter or None
        The directory of the last start; None before the first.

    Raises
    ------
    InvalidValue
        The strategy is not of this package: run Flower's strategies inside `Hosted`.
    """

    def __init__(
        self, strategy: Strategy, name: str | Path = "", *, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.strategy = strategy
        self.run: RunWriter | None = None
        self._base = base_of(strategy)
        self._path = runs_folder() / Path(name).expanduser() if str(name) else None
        self._callbacks = callbacks

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **options: Any
    ) -> Result:
        """Run up to round ``num_rounds`` and record the run, or continue the one in the directory.

        Parameters
        ----------
        grid, initial_arrays
            Arguments of ``strategy.start``.
        num_rounds : int
            Number of the last round, counted from the beginning of the run.
        **options
            Options of ``strategy.start``: ``timeout``, ``train_config``, ``evaluate_config``,
            ``evaluate_fn``.

        Raises
        ------
        UnfitSetting
            The directory holds a run with another plan, model or strategy; the message names the
            differences.
        InvalidValue
            The run in the directory is complete, or the directory holds other files.
        InUse
            Another process writes to the directory.
        """
        method = _method(self.strategy)
        config: dict[str, Any] = {
            "method": method,
            "rounds": num_rounds,
            **_identity(self.strategy, self._base, initial_arrays),
        }
        if self._path is not None:
            _refuse_complete(self._path, num_rounds)
            config |= {"run-directory": str(self._path), "resume": True}
        with recorded_run(config, method, self._callbacks) as run:
            self.run = run
            return record(
                run, self.strategy, grid, initial_arrays, num_rounds=num_rounds, **options
            )

    def guarantees(self) -> list[Guarantee]:
        """Return the guarantees of the strategy (see `FederatedStrategy.guarantees`)."""
        return self._base.guarantees()


def _refuse_complete(path: Path, num_rounds: int) -> None:
    if not (path / "run.json").is_file():
        return
    run = RunDirectory.open(path)
    done = int(run.metrics().last)
    if run.status == "completed" and num_rounds <= done:
        raise InvalidValue(
            f"{path} holds a run that is complete, after {done} rounds: for a new run, give "
            f"recorded(...) another name, or none; to continue this run, replace num_rounds="
            f"{num_rounds} by a number above {done}"
        )


def _method(strategy: Strategy) -> str:
    """Return a name for the run of a strategy; hyphens join its parts.

    The parts are the name of the wrapper, if there is one, the name of the method and, for
    `Hosted`, the name of Flower's strategy.
    """
    base = getattr(strategy, "base", None)
    if base is not None:
        return f"{type(strategy).__name__}-{_method(base)}"
    if not isinstance(strategy, FederatedStrategy):
        return type(strategy).__name__
    method = strategy.method
    return method.name if method.label == method.name else f"{method.name}-{method.label}"


def _identity(strategy: Strategy, base: FederatedStrategy, arrays: ArrayRecord) -> dict[str, Any]:
    """Return the settings that identify a run: plan, model, options and training.

    A resumed run must have the same ones, so each is a number, or a text that is the same in every
    process.
    """
    run, method = base.run, base.method
    plan, of_method = _fields(run.plan), dict[str, Any]()
    for name, value in _fields(method).items():
        if not isinstance(value, LocalTraining):
            of_method[name] = value
        # A ClientApp that does not use this package defines its own training.
        elif not method.any_client_app or value != LocalTraining():
            of_method[f"training-{name}"] = value
    identity = {
        "plan": type(run.plan).__name__,
        "planned-rounds": plan.pop("rounds", 0),
        **plan,
        "parameters": sum(array.numpy().size for array in arrays.values()),
        **of_method,
        "stragglers": run.stragglers,
        "seed": run.seed or 0,
        "seeded-noise": run.seeded_noise,
        "evaluate-every": run.evaluate_every,
        "training-loss": run.training_loss,
        "diagnostics": run.diagnostics,
        "frozen": run.frozen,
        "coefficient": getattr(strategy, "coefficient", None),
    }
    settings = {name.replace("_", "-"): _plain(value) for name, value in identity.items()}
    return {name: value for name, value in settings.items() if value != ""}


def _fields(value: Any) -> dict[str, Any]:
    """Return the settings of an object, by name.

    The settings of a dataclass are its fields. The settings of any other object, such as one of
    Flower's strategies, are those attributes that are numbers or texts.
    """
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    attributes = getattr(value, "__dict__", {})
    return {n: part for n, part in attributes.items() if isinstance(part, int | float | str)}


def _plain(value: Any) -> str | int | float | bool:
    """Describe a value by a number or a text that is the same in every process.

    None becomes an empty text. The text for any other object has its name and settings, but not its
    address in memory.
    """
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | int | float | bool):
        return value
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(str(_plain(part)) for part in value)
    if parts := _fields(value):
        plain_parts = {name: _plain(part) for name, part in parts.items()}
        texts = (f"{name}={plain}" for name, plain in plain_parts.items() if plain != "")
        return f"{type(value).__name__}({', '.join(texts)})"
    return getattr(value, "__qualname__", type(value).__name__)
