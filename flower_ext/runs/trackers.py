"""Trackers: callbacks that copy a run to TensorBoard, MLflow, or Weights & Biases.

Each logs the settings once, then every number of every round (scores, traffic, ε and δ), and at
the end the guarantees in words and the report. By default everything stays on this machine, in the
run directory. The environment variables of MLflow and W&B can send it elsewhere.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.directory import RunDirectory

TENSORBOARD = "torch.utils.tensorboard"
"""PyTorch's writer of event files, which needs the package ``tensorboard``."""


class TensorBoard(Callback):
    """Write event files to ``tensorboard/`` in the run directory.

    View them with ``tensorboard --logdir RUN/tensorboard``, or all runs with ``--logdir runs``.
    """

    def __init__(self) -> None:
        self._library = _library(TENSORBOARD, "tensorboard")
        self._writer: Any = None

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Write one point per metric; after a resume, the first point hides the ones it repeats."""
        again = "cohort" in row  # otherwise the row adds scores to a round that was already written
        first_new = server_round if again else server_round + 1
        writer = self._writer_of(run, purge_step=first_new if run.resumed else None)
        for name, value in row.items():
            writer.add_scalar(name, value, server_round)
        writer.flush()

    def end(self, run: RunDirectory) -> None:
        """Write a text on how the run ended, with its guarantees."""
        writer = self._writer_of(run, purge_step=None)
        writer.add_text("outcome", _outcome(run))
        writer.close()
        self._writer = None

    def _writer_of(self, run: RunDirectory, *, purge_step: int | None) -> Any:
        if self._writer is None:
            folder = _folder(run, "tensorboard")
            self._writer = self._library.SummaryWriter(str(folder), purge_step=purge_step)
            lines = (f"| {name} | {value} |" for name, value in run.config.items())
            table = ["| setting | value |", "| --- | --- |", *lines]
            self._writer.add_text("settings", "\n".join(table))
        return self._writer


class MLflow(Callback):
    """Write to MLflow: to ``mlflow/`` in the run directory, or to ``MLFLOW_TRACKING_URI``.

    View a local one with ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db``, which
    needs the full MLflow package. The experiment is ``flower_ext``, or ``MLFLOW_EXPERIMENT_NAME``.
    A resumed run continues the same MLflow run.
    """

    _TAG = "flower_ext.run"

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._library = _library("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""

    def begin(self, run: RunDirectory) -> None:
        """Find the MLflow run of an earlier start, or create one and log the settings."""
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder = _folder(run, "mlflow")
            getLogger("mlflow.store.db.utils").setLevel("WARNING")  # while it makes tables
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        client = self._library.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "flower_ext")
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            place = client.create_experiment(name, artifact_location=artifacts)
        else:
            place = experiment.experiment_id
        found = client.search_runs([place], f"tags.`{self._TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            made = client.create_run(place, tags={self._TAG: run.id}, run_name=run.path.name)
            self._id = made.info.run_id
            entities = self._library.entities
            params = [entities.Param(key, str(value)) for key, value in run.config.items()]
            client.log_batch(self._id, params=params)
        self._client = client

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Log one point per metric, in one request."""
        if self._client is None:
            return
        now = int(time.time() * 1000)
        metric = self._library.entities.Metric
        points = [metric(name, float(value), now, server_round) for name, value in row.items()]
        self._client.log_batch(self._id, metrics=points)

    def end(self, run: RunDirectory) -> None:
        """Log the guarantees and the report as artifacts, then the status."""
        if self._client is None:
            return
        self._client.log_text(self._id, _outcome(run), "outcome.md")
        for name in ("guarantee.json", "report.html"):
            if (run.path / name).is_file():
                self._client.log_artifact(self._id, str(run.path / name))
        failed = run.facts["status"] == "failed"
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class WandB(Callback):
    """Write to Weights & Biases: to ``wandb/`` in the run directory, offline.

    ``WANDB_MODE=online`` sends everything to the servers of Weights & Biases during the run,
    including clients' un-noised scores. ``wandb sync RUN/wandb/offline-run-…`` does so after the
    run. The
    project is ``flower_ext``, or ``WANDB_PROJECT``. A resumed run continues under the same id.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._library = _library("wandb", "wandb")
        self._run: Any = None

    def begin(self, run: RunDirectory) -> None:
        """Begin or continue a W&B run, without reading code or hardware."""
        _folder(run, "wandb")
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "flower_ext"),
            id=run.id,
            name=run.path.name,
            resume="allow",
            config=run.config,
            dir=str(run.path),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=self._library.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        self._run.define_metric("*", step_metric="round")

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Log the row, with ``round`` as the axis because a round may be repeated."""
        if self._run is not None:
            self._run.log({"round": server_round, **row})

    def end(self, run: RunDirectory) -> None:
        """Copy the guarantees and the report into the W&B run, and finish it."""
        if self._run is None:
            return
        facts = {"status": run.facts["status"], "outcome": _outcome(run)}
        self._run.summary.update(facts)
        for name in ("guarantee.json", "report.html"):
            if (run.path / name).is_file():
                shutil.copy(run.path / name, self._run.dir)  # so that W&B keeps them
        self._run.finish(exit_code=int(run.facts["status"] == "failed"))


TRACKERS: Mapping[str, type[Callback]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""Trackers by the names that the setting ``trackers`` accepts."""


def callbacks_of(given: Iterable[str | Callback]) -> list[Callback]:
    """Return callbacks as they are, and a tracker for each name.

    Raises
    ------
    InvalidValue
        A name is not a tracker's, or the tracker's library is not installed.
    """
    made = []
    for one in given:
        if isinstance(one, Callback):
            made.append(one)
        elif one in TRACKERS:
            made.append(TRACKERS[one]())
        else:
            raise InvalidValue(f"trackers={one!r}: expected some of {', '.join(TRACKERS)}")
    return made


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidValue(
            f"trackers={extra!r}: its library cannot be imported ({error}); "
            f"pip install 'flower-ext[{extra}]'"
        ) from error


def _folder(run: RunDirectory, name: str) -> Path:
    """Make a folder in the run directory that only its user may read."""
    folder = run.path / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _outcome(run: RunDirectory) -> str:
    facts = run.facts
    reason = f": {facts['reason']}" if facts.get("reason") else ""
    statements = [guarantee.statement() for guarantee in run.guarantees()]
    return "\n\n".join([f"{facts['status']}{reason}", *statements])
