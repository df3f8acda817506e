"""Prepare a run: check its options, and complete its settings and paths, before anything starts."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue
from flower_ext.files import FOLDER_VARIABLE, read_toml
from flower_ext.plugins import how_to_install
from flower_ext.runs.app_settings import SettingsFile, checked_settings, preset
from flower_ext.runs.directory import RUNS_VARIABLE, RunDirectory, new_run_path
from flower_ext.runs.settings import (
    OF_NODES,
    PATHS,
    RECORDED,
    UnfitSetting,
    clients_setting,
    num_nodes,
)

RunsFolder = Annotated[
    Path, typer.Option(envvar=RUNS_VARIABLE, help="Folder for new run directories.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override of a setting, name=value; repeatable.")
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``flower-ext run``; its help explains them."""

    app: Path
    superlink: str | None = None
    clients: int | None = None
    preset: str | None = None
    settings_file: Path | None = None
    settings: Sequence[str] = ()
    runs: Path | None = None
    in_process: bool = False
    workers: int = 1
    resume: Path | None = None

    def __post_init__(self) -> None:
        if self.in_process and self.superlink is not None:
            raise InvalidValue(
                "a run in one process has no SuperLink: leave out the SuperLink's name, or "
                "--in-process"
            )
        if self.preset is not None and self.settings_file is not None:
            raise InvalidValue("give either --preset or --settings: each names a file of settings")
        if self.resume is not None and (self.preset or self.settings_file):
            raise InvalidValue(
                "a resumed run keeps the settings under which it began: leave out --preset and "
                "--settings"
            )
        if self.workers > 1 and not self.in_process:
            raise InvalidValue(
                f"workers={self.workers}: Ray starts its own workers; add --in-process, or leave "
                "out --workers"
            )


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose options and settings are checked, ready to start."""

    options: RunOptions
    config: Mapping[str, Any]
    changes: Mapping[str, Any]
    """The settings that override the app's defaults."""
    path: Path | None
    """The run directory; None if no setting names it."""
    nodes: int | None
    """Number of nodes to simulate; None if neither options nor settings give it."""


def prepare(options: RunOptions) -> PreparedRun:
    """Return the run that the options describe; start and write nothing."""
    file = _settings_file(options)
    defaults, changes = checked_settings(options.app, options.settings, file)
    if options.superlink is None:
        _check_plugins(options.app)
    if options.resume is not None:
        changes = {**first_settings(options.resume, options.app, defaults), **changes}
    setting = clients_setting({**defaults, **changes})
    if setting is not None and options.clients is not None:
        changes[setting] = options.clients
    changes |= _choose_clients_per_node(options, {**defaults, **changes})
    if file is not None and "preset" in defaults:
        changes["preset"] = file.text(changes, defaults)
    path, changes = _choose_paths(options, defaults, changes)
    config = {**defaults, **changes}
    nodes = options.clients if setting is None else num_nodes(config)
    if options.superlink is None and nodes is None:
        raise InvalidValue(
            f"{options.app} has no setting 'clients', so the number of clients is unknown; add "
            "clients = N to [tool.flwr.app.config] of its pyproject.toml, or give --clients=N"
        )
    return PreparedRun(options=options, config=config, changes=changes, path=path, nodes=nodes)


def _settings_file(options: RunOptions) -> SettingsFile | None:
    """Return the file of settings that the options name; None if they name none."""
    if options.preset is not None:
        return preset(options.app, options.preset)
    return None if options.settings_file is None else SettingsFile.read(options.settings_file)


def _choose_clients_per_node(options: RunOptions, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the setting ``clients-per-node`` if the command chooses it; show a choice for Ray."""
    per_node = config.get("clients-per-node")
    # In one process each client is its own node, because the engine forms batches of clients.
    if options.in_process and per_node is not None:
        return {"clients-per-node": 1}
    if options.superlink is not None or per_node != 0:
        return {}
    changes = {"clients-per-node": clients_per_node(config)}
    count = num_nodes({**config, **changes})
    console.print(f"Ray: {count} nodes with {changes['clients-per-node']} clients each")
    return changes


def _check_plugins(app: Path) -> None:
    """Refuse an app that depends on a plug-in of this project that is not installed here."""
    project = read_toml(app / "pyproject.toml").get("project", {})
    for dependency in project.get("dependencies", ()):
        plugin = re.match(r"(flower-ext-[a-z]+)(\[[a-z,]+\])?", dependency)
        if plugin and find_spec(plugin[1].replace("-", "_")) is None:
            raise InvalidValue(f"{app} needs a plug-in: {how_to_install(plugin[0])}")


def _choose_paths(
    options: RunOptions, defaults: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the run directory (None if no setting names it), and the changes with all paths."""
    is_local, config = options.superlink is None, {**defaults, **changes}
    if (is_local or options.runs is not None) and not config.get("run-directory", True):
        name, folder = str(config.get("method", options.app.name)), options.runs or Path("runs")
        config["run-directory"] = str(new_run_path(folder, name, datetime.now(UTC)))
    if is_local and not config.get("data-folder", True):
        config["data-folder"] = os.environ.get(FOLDER_VARIABLE)
    paths = _absolute(config, is_local=is_local)
    path = Path(paths["run-directory"]) if "run-directory" in paths else None
    if is_local and path and "state-folder" not in changes and defaults.get("state-folder") == "":
        paths["state-folder"] = str(path / "state")  # for --resume
    return path, {**changes, **paths}


def clients_per_node(config: Mapping[str, Any]) -> int:
    """Return the number of clients on each node, with at most one node per core."""
    clients = int(config["clients"])
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    nodes = range(min(clients, cores), 0, -1)
    return next(clients // count for count in nodes if clients % count == 0)


def first_settings(run: Path, app: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to resume a run: its first settings, ``resume`` and its present path."""
    if "resume" not in defaults:
        raise InvalidValue(
            "the app has no setting 'resume', so its runs cannot be resumed: start a new run"
        )
    directory = RunDirectory.open(run)
    began = directory.config
    if strange := [name for name in began if name not in {*defaults, *RECORDED}]:
        named = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        raise InvalidValue(
            f"resume={str(run)!r}: expected a run of {app}, but its settings include some that "
            f"this app lacks ({named}); name the app that made the run"
        )
    directory.check_free()
    known = {name: value for name, value in began.items() if name in defaults}
    if known.get("state-folder") == str(Path(str(began.get("run-directory")), "state")):
        del known["state-folder"]  # the run directory, and this folder with it, may have moved
    return {**known, "run-directory": str(run.expanduser().absolute()), "resume": True}


def _absolute(config: Mapping[str, Any], *, is_local: bool) -> dict[str, str]:
    """Return the settings that are paths, as absolute paths if the run is on this machine.

    On other machines, only paths on nodes may be relative.
    """
    paths = {name: str(config[name]) for name in PATHS if config.get(name)}
    if is_local:
        return {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}
    for name, path in paths.items():
        if name not in OF_NODES and not path.startswith(("/", "~")):
            raise UnfitSetting(
                f"run-config {name}={path!r}: expected an absolute path on the machine where the "
                "SuperLink starts the ServerApp"
            )
    return paths
