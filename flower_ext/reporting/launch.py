"""Start a Flower app as ``flwr run`` does, wait for it, and fail when it failed.

``flwr run`` itself returns 0 for a run that failed, starts two simulated nodes whatever the app
needs, and installs the app's dependencies afresh unless told otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flower_ext.data import FOLDER_VARIABLE
from flower_ext.reporting.run import new_run_path


class LaunchFailed(RuntimeError):
    """The app could not be started, or its run did not complete."""


def launch(
    app: Path,
    *,
    superlink: str | None = None,
    settings: Sequence[str] = (),
    runs: Path = Path("runs"),
    in_process: bool = False,
) -> Path | None:
    """Run an app, streaming its log; returns its run directory, where the app has one.

    Parameters
    ----------
    app : Path
        Folder with the app's ``pyproject.toml``.
    superlink : str, optional
        Connection of Flower's configuration. None is the local simulation, with as many nodes as
        the app's setting ``clients`` or ``num-silos``.
    settings : Sequence[str]
        Run-config overrides, ``name=value``.
    runs : Path
        Folder in which the run directory is made.
    in_process : bool
        All clients in one process, without Ray: what is trained in a round is trained together.

    Raises
    ------
    LaunchFailed
        Unknown setting, ``flwr run`` refused, or the run ended in failure.
    """
    if in_process and superlink is not None:
        raise LaunchFailed("a run in one process has no SuperLink: leave out one of the two")
    defaults = _defaults(app)
    changes = dict(_override(setting, defaults) for setting in settings)
    if not {**defaults, **changes}.get("run-directory", True):
        name = str(changes.get("method", defaults.get("method", app.name)))
        changes["run-directory"] = str(new_run_path(runs.absolute(), name, datetime.now(UTC)))
    if not {**defaults, **changes}.get("data-folder", True) and FOLDER_VARIABLE in os.environ:
        changes["data-folder"] = str(Path(os.environ[FOLDER_VARIABLE]).expanduser().absolute())
    config = {**defaults, **changes}
    path = Path(config["run-directory"]) if config.get("run-directory") else None
    if in_process:
        config |= {"clients-per-node": 1} if "clients-per-node" in config else {}
        if num_nodes(config) is None:
            raise LaunchFailed(f"{app} has no setting 'clients': how many there are is unknown")
        engine = [sys.executable, "-m", "flower_ext.federation.run_app", str(app)]
        done = subprocess.run(engine, input=json.dumps(config), text=True, check=False)
        if done.returncode:
            raise LaunchFailed("the run ended with the error above")
        return path

    command = ["run", str(app), *([superlink] if superlink else []), "--format", "json"]
    for key, value in changes.items():
        command += ["--run-config", f"{key}={_toml(value)}"]
    if superlink is None and (count := num_nodes(config)) is not None:
        nodes = f"num-supernodes={count} client-resources-num-cpus=1"
        command += ["--federation-config", nodes]
    answer = json.loads(_flwr(*command).stdout or "{}")
    if not answer.get("success"):
        raise LaunchFailed(f"flwr run refused: {answer.get('error-message', answer)}")
    run_id, connection = str(answer["run-id"]), [superlink] if superlink else []
    subprocess.run([_executable(), "log", run_id, *connection, "--stream"], check=False, env=_env())
    listed = _flwr("list", *connection, "--run-id", run_id, "--format", "json")
    (facts,) = json.loads(listed.stdout)["runs"]
    if facts["status"] != "finished:completed":
        raise LaunchFailed(f"run {run_id} ended as {facts['status']}: {facts['status-details']}")
    return path


def num_nodes(config: Mapping[str, Any]) -> int | None:
    """How many nodes an app's settings ask for; None where they do not say."""
    count = config.get("clients", config.get("num-silos"))
    if count is None:
        return None
    per_node = int(config.get("clients-per-node", 1))
    if per_node < 1 or int(count) % per_node:
        raise LaunchFailed(f"clients={count} is no multiple of clients-per-node={per_node}")
    return int(count) // per_node


def _defaults(app: Path) -> dict[str, Any]:
    project = app / "pyproject.toml"
    if not project.is_file():
        raise LaunchFailed(f"{app} holds no pyproject.toml: it is not a Flower app")
    flwr = tomllib.loads(project.read_text()).get("tool", {}).get("flwr", {})
    config: dict[str, Any] = flwr.get("app", {}).get("config", {})
    return config


def _override(setting: str, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    name, separator, text = setting.partition("=")
    if not separator or name not in defaults:
        raise LaunchFailed(
            f"setting {setting!r}: expected name=value with one of {', '.join(sorted(defaults))}"
        )
    kind = type(defaults[name])
    try:
        return name, {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise LaunchFailed(f"setting {name}={text!r}: expected a {kind.__name__}") from None


def _toml(value: Any) -> str:
    return json.dumps(value)  # strings, numbers and booleans are written alike


def _flwr(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_executable(), *arguments], capture_output=True, text=True, check=False, env=_env()
    )


def _executable() -> str:
    beside = Path(sys.executable).parent / "flwr"
    found = str(beside) if beside.exists() else shutil.which("flwr")
    if found is None:
        raise LaunchFailed("the command flwr was not found; pip install 'flwr[simulation]'")
    return found


def _env() -> dict[str, str]:
    # The environment that runs this command has what the app needs; flwr looks there for its
    # own commands, and need not install anything.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", **os.environ, "PATH": path}
