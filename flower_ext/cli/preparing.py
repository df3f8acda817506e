"""Settings of a run before it starts: the app's defaults, their overrides, and its paths."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flower_ext.cli.project import checked_settings
from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue
from flower_ext.runs.directory import RunDirectory, new_run_path
from flower_ext.runs.settings import (
    PATHS,
    RECORDED,
    UnfitSetting,
    clients_setting,
    num_nodes,
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can start.

    Parameters
    ----------
    config : Mapping[str, Any]
        All settings of the run.
    changes : Mapping[str, Any]
        The settings that override the app's defaults.
    path : Path, optional
        The run directory, if the command chooses it.
    here : bool
        True if all processes of the run see the files of this machine.
    nodes : int, optional
        Number of nodes to simulate.
    resumable : bool
        True if the app's runs can be resumed.
    """

    config: Mapping[str, Any]
    changes: Mapping[str, Any]
    path: Path | None
    here: bool
    nodes: int | None
    resumable: bool


def prepare(
    app: Path,
    *,
    superlink: str | None = None,
    nodes: int | None = None,
    settings: Sequence[str] = (),
    runs: Path | None = None,
    in_process: bool = False,
    clients: int | None = None,
    workers: int = 1,
    resume: Path | None = None,
    ray: str | None = None,
) -> Prepared:
    """Return the run that the options of `launch.launch` describe; start and write nothing.

    Raises
    ------
    InvalidValue
        The options contradict each other or the app, a setting has a value that it cannot have, or
        there is no run of this app to resume.
    InUse
        A process still writes the run to resume.
    """
    in_process = in_process or clients is not None
    if in_process and superlink is not None:
        raise InvalidValue(
            "a run in one process has no SuperLink: leave out either the SuperLink, or "
            "--in-process and --clients"
        )
    if workers > 1 and not in_process:
        raise InvalidValue(
            f"workers={workers}: Ray starts its own workers; add --in-process or --clients"
        )
    if ray is not None and (in_process or superlink is not None):
        raise InvalidValue(f"ray={ray}: only a simulation runs on Ray; leave out the other engine")
    defaults, changes = checked_settings(app, settings)
    if resume is not None:
        changes = {**begun_with(resume, app, defaults), **changes}
    config = ChainMap(changes, defaults)
    setting = clients_setting(defaults)
    here = superlink is None or nodes is not None
    if nodes is not None and setting is not None:
        if superlink is None:
            raise InvalidValue(
                f"--nodes={nodes}: {app} has a setting for the number of nodes; give --set "
                f"{setting}=N in place of --nodes"
            )
        changes.setdefault(setting, nodes * (config.get("clients-per-node") or 1))
    if clients is not None:
        if setting is None:
            raise InvalidValue(
                f"--clients={clients}: {app} has no setting for the number of clients; give "
                f"--in-process --nodes={clients}, or add 'clients' to [tool.flwr.app.config] of "
                "its pyproject.toml"
            )
        changes[setting] = clients
    if (here or runs is not None) and not config.get("run-directory", True):
        name, folder = str(config.get("method", app.name)), runs or Path("runs")
        folder = folder.absolute() if here else folder
        changes["run-directory"] = str(new_run_path(folder, name, datetime.now(UTC)))
    changes |= _absolute(config, here=here)
    path = Path(config["run-directory"]) if config.get("run-directory") else None
    if here and path and defaults.get("state-folder") == "" and superlink is None:
        changes.setdefault("state-folder", _state_in(path))  # for --resume
    if in_process and "clients-per-node" in config:
        changes["clients-per-node"] = 1
    if superlink is None and config.get("clients-per-node") == 0:
        changes["clients-per-node"] = per_node = clients_per_node(config)
        console.print(f"Ray: {num_nodes(config)} nodes with {per_node} clients each")
    count = nodes if setting is None else num_nodes(config)
    if superlink is None and count is None:
        raise InvalidValue(
            f"{app} has no setting 'clients', so the number of clients is unknown; add clients = N "
            "to [tool.flwr.app.config] of its pyproject.toml, or give --nodes=N"
        )
    if here and not config.get("data-folder", True):
        from flower_ext.data import FOLDER_VARIABLE  # imports torch, which takes seconds

        changes |= _absolute({"data-folder": os.environ.get(FOLDER_VARIABLE)}, here=True)
    return Prepared(
        config=dict(config),
        changes=changes,
        path=path,
        here=here,
        nodes=count,
        resumable="resume" in defaults,
    )


def clients_per_node(config: Mapping[str, Any]) -> int:
    """Return the number of clients on each node: equal for all, with at most one node per core."""
    clients = int(config["clients"])
    nodes = range(min(clients, _cores()), 0, -1)
    return next(clients // count for count in nodes if clients % count == 0)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def begun_with(run: Path, app: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under which a resumed run began.

    Raises
    ------
    InvalidValue
        There is no run, it is a run of another app, or the app's runs cannot be resumed.
    InUse
        A process still writes the run; the message names it.
    """
    if "resume" not in defaults:
        raise InvalidValue(
            "the app has no setting 'resume', so its runs cannot be resumed: start a new run"
        )
    directory = RunDirectory.open(run)
    began = directory.config
    if strange := [name for name in began if name not in {*defaults, *RECORDED}]:
        named = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        raise InvalidValue(
            f"resume={str(run)!r}: expected a run of {app}; this run is of another app, with "
            f"settings that this app lacks ({named})"
        )
    directory.check_free()
    known = {name: value for name, value in began.items() if name in defaults}
    if known.get("state-folder") == _state_in(str(began.get("run-directory"))):
        del known["state-folder"]  # the run directory, and this folder with it, may have moved
    return {**known, "run-directory": str(run.expanduser().absolute()), "resume": True}


def _absolute(config: Mapping[str, Any], *, here: bool) -> dict[str, str]:
    """Return the paths among an app's settings as absolute paths, for every process of the run.

    If the run is on other machines, a relative ``data-folder`` stays relative, because each node
    has its own files.
    """
    paths = {name: str(config[name]) for name in PATHS if config.get(name)}
    if here:
        return {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}
    for name, path in paths.items():
        if name != "data-folder" and not path.startswith(("/", "~")):
            raise UnfitSetting(
                f"run-config {name}={path!r}: expected an absolute path on the machine where the "
                "SuperLink starts the ServerApp"
            )
    return paths


def _state_in(run: str | Path) -> str:
    """Return the folder in which clients of a simulation keep their memory by default."""
    return str(Path(run, "state"))
