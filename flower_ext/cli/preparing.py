"""Settings of a run before it starts: the app's defaults, their overrides, and its paths."""

from __future__ import annotations

import os
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flower_ext.cli.ending import LaunchFailed
from flower_ext.cli.screen import console
from flower_ext.data import FOLDER_VARIABLE
from flower_ext.runs.directory import NotARun, RunDirectory, new_run_path
from flower_ext.runs.settings import PATHS, clients_setting, integer, num_nodes


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
    LaunchFailed
        The options contradict each other or the app, or there is no run to resume.
    UnfitSetting
        The numbers of clients in the settings do not fit each other.
    """
    in_process = in_process or clients is not None
    if in_process and superlink is not None:
        raise LaunchFailed(
            "a run in one process has no SuperLink: leave out either the SuperLink, or "
            "--in-process and --clients"
        )
    if workers > 1 and not in_process:
        raise LaunchFailed(
            f"workers={workers}: Ray starts its own workers; add --in-process or --clients"
        )
    if ray is not None and (in_process or superlink is not None):
        raise LaunchFailed(f"ray={ray}: only a simulation runs on Ray; leave out the other engine")
    defaults, changes = checked_settings(app, settings)
    if resume is not None:
        changes = {**_begun_with(resume, defaults), **changes}
    config = ChainMap(changes, defaults)
    setting = clients_setting(defaults)
    here = superlink is None or nodes is not None
    if nodes is not None and setting is not None:
        if superlink is None:
            raise LaunchFailed(
                f"--nodes={nodes}: {app} has a setting for the number of nodes; give --set "
                f"{setting}=N in place of --nodes"
            )
        changes.setdefault(setting, nodes * (config.get("clients-per-node") or 1))
    if clients is not None:
        if setting is None:
            raise LaunchFailed(
                f"--clients={clients}: {app} has no setting for the number of clients; add "
                "'clients' to [tool.flwr.app.config] of its pyproject.toml"
            )
        changes[setting] = clients
    if (here or runs is not None) and not config.get("run-directory", True):
        name, folder = str(config.get("method", app.name)), runs or Path("runs")
        folder = folder.absolute() if here else folder
        changes["run-directory"] = str(new_run_path(folder, name, datetime.now(UTC)))
    if here and FOLDER_VARIABLE in os.environ and not config.get("data-folder", True):
        changes["data-folder"] = os.environ[FOLDER_VARIABLE]
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
        alone = "" if in_process else ", or give --nodes=N"
        raise LaunchFailed(
            f"{app} has no setting 'clients', so the number of clients is unknown; add clients = N "
            f"to [tool.flwr.app.config] of its pyproject.toml{alone}"
        )
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
    clients = integer(config, "clients", least=1)
    nodes = range(min(clients, _cores()), 0, -1)
    return next(clients // count for count in nodes if clients % count == 0)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_settings(app: Path, settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's default settings, and the overrides in ``settings`` (``name=value``).

    Raises
    ------
    LaunchFailed
        There is no app, the app has no such setting, or a value does not fit its setting.
    """
    project = app / "pyproject.toml"
    if not app.is_dir():
        raise LaunchFailed(
            f"app={app}: expected the folder of a Flower app; there is no such folder"
        )
    if not project.is_file():
        raise LaunchFailed(
            f"app={app}: expected the folder of a Flower app; there is no pyproject.toml in it"
        )
    try:
        facts = tomllib.loads(project.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LaunchFailed(f"{project} is not valid TOML: {error}") from None
    flwr = facts.get("tool", {}).get("flwr", {})
    defaults: dict[str, Any] = flwr.get("app", {}).get("config", {})
    return defaults, dict(_override(setting, defaults) for setting in settings)


def _begun_with(run: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under which a resumed run began."""
    if "resume" not in defaults:
        raise LaunchFailed(
            "the app has no setting 'resume', so its runs cannot be resumed: start a new run"
        )
    try:
        began = RunDirectory.open(run).config
    except NotARun as error:
        raise LaunchFailed(str(error)) from None
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
            raise LaunchFailed(
                f"run-config {name}={path!r}: expected an absolute path on the machine where the "
                "SuperLink starts the ServerApp"
            )
    return paths


def _state_in(run: str | Path) -> str:
    """Return the folder in which clients of a simulation keep their memory by default."""
    return str(Path(run, "state"))


_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _override(setting: str, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    name, separator, text = setting.partition("=")
    if not separator or name not in defaults:
        alike = get_close_matches(name, defaults)
        meant = f"did you mean {' or '.join(alike)}? " if alike else ""
        raise LaunchFailed(
            f"setting {setting!r}: {meant}expected name=value with one of "
            f"{', '.join(sorted(defaults))}"
        )
    kind = type(defaults[name])
    try:
        return name, {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise LaunchFailed(f"setting {name}={text!r}: expected {_EXPECTED[kind]}") from None
