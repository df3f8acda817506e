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
import time
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flower_ext.cli.screen import console
from flower_ext.data import FOLDER_VARIABLE
from flower_ext.errors import FlowerExtError
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunDirectory, new_run_path
from flower_ext.runs.report import write_report
from flower_ext.runs.settings import PATHS, clients_setting, integer, num_nodes

_ENGINE = "flower_ext.federation.engines.run_app"
"""The program of a run in one process; apart from this one, so that Ctrl-C leaves it time."""

PATIENCE = 180
"""Seconds to wait for a SuperLink that does not answer."""

GRACE = 30
"""Seconds that an interrupted run in one process has to write its end."""


class LaunchFailed(FlowerExtError, RuntimeError):
    """The app could not be started, or its run did not complete."""


def launch(
    app: Path,
    *,
    superlink: str | None = None,
    nodes: int | None = None,
    settings: Sequence[str] = (),
    runs: Path = Path("runs"),
    in_process: bool = False,
    clients: int | None = None,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    resume: Path | None = None,
) -> Path | None:
    """Run an app, streaming its log; returns its run directory, where the app has one.

    Parameters
    ----------
    app : Path
        Folder with the app's ``pyproject.toml``.
    superlink : str, optional
        Connection of Flower's configuration. None is the local simulation, with as many nodes as
        the app's setting ``clients`` or ``num-silos``.
    nodes : int, optional
        How many nodes the SuperLink has: the value of that setting, where the app has it. Given
        for a SuperLink of this machine alone, whose processes see the same files.
    settings : Sequence[str]
        Run-config overrides, ``name=value``. Relative paths start here; one to write to is refused
        where the SuperLink may be on another machine.
    runs : Path
        Folder in which the run directory is made.
    in_process : bool
        All clients in one process, without Ray: what is trained in a round is trained together.
    clients : int, optional
        So many, in one process: the value of the app's setting for them.
    workers : int
        Of a run in one process: how many such processes share the clients.
    env : Mapping[str, str], optional
        Variables for Flower's commands; by default `environment`.
    resume : Path, optional
        Run directory of the app that is gone on with, under the settings that it began with.

    Raises
    ------
    LaunchFailed
        Unknown setting, no run to resume, ``flwr run`` refused, or the run ended in failure.
    UnfitSetting
        The numbers of clients in the settings do not fit each other.
    """
    in_process = in_process or clients is not None
    if in_process and superlink is not None:
        raise LaunchFailed("a run in one process has no SuperLink: leave out one of the two")
    if workers > 1 and not in_process:
        raise LaunchFailed(f"workers={workers}: Ray starts its own; add --in-process or --clients")
    defaults, changes = checked_settings(app, settings)
    if resume is not None:
        changes = {**_begun_with(resume, defaults), **changes}
    config = ChainMap(changes, defaults)
    setting = clients_setting(defaults)
    if nodes is not None and setting is not None:
        changes.setdefault(setting, nodes * (config.get("clients-per-node") or 1))
    if clients is not None:
        if setting is None:
            raise LaunchFailed(
                f"--clients={clients}: {app} has no setting for how many there are; add 'clients' "
                "to [tool.flwr.app.config]"
            )
        changes[setting] = clients
    if not config.get("run-directory", True):
        name = str(config.get("method", app.name))
        changes["run-directory"] = str(new_run_path(runs.absolute(), name, datetime.now(UTC)))
    here = superlink is None or nodes is not None
    if here and FOLDER_VARIABLE in os.environ and not config.get("data-folder", True):
        changes["data-folder"] = os.environ[FOLDER_VARIABLE]
    changes |= _absolute(config, here=here)
    path = Path(config["run-directory"]) if config.get("run-directory") else None
    if superlink is None and path and defaults.get("state-folder") == "":
        changes.setdefault("state-folder", _state_in(path))  # for --resume
    if in_process and "clients-per-node" in config:
        changes["clients-per-node"] = 1
    if superlink is None and config.get("clients-per-node") == 0:
        changes["clients-per-node"] = per_node = clients_per_node(config)
        console.print(f"Ray: {num_nodes(config)} nodes with {per_node} clients each")
    count = num_nodes(config)
    if in_process:
        if count is None:
            raise LaunchFailed(
                f"{app} has no setting 'clients': how many there are is unknown; add it to "
                "[tool.flwr.app.config]"
            )
        engine = [sys.executable, "-m", _ENGINE, str(app), str(workers)]
        status = _exit_status(engine, json.dumps(dict(config)))
        if status < 0:
            reason = f"the run was ended by signal {-status}"
            _note_failure(path, reason)
            raise LaunchFailed(reason)
        if status:
            raise LaunchFailed("the run ended with the error above")
        return path

    connection = [superlink] if superlink else []
    command = ["run", str(app), *connection]
    for key, value in changes.items():
        # As TOML, which is JSON here but for escapes beyond the first plane.
        command += ["--run-config", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if superlink is None and count is not None:
        federation = f"num-supernodes={count} client-resources-num-cpus=1"
        command += ["--federation-config", federation]
    env = environment() if env is None else env
    try:
        answer = _answer(command, env)
    except KeyboardInterrupt:
        raise LaunchFailed(
            "interrupted while the run was being started: if it was, it goes on; "
            + _how_to_stop("ID", connection)
        ) from None
    if not answer.get("success"):
        hint = hint_on_spaces() if superlink is None else ""
        raise LaunchFailed(f"flwr run refused: {answer.get('error-message', answer)}{hint}")
    run_id = str(answer["run-id"])
    try:
        facts = _finished(run_id, connection, env)
    except KeyboardInterrupt:
        facts = _stopped(run_id, connection, env)
    if facts["status"] != "finished:completed":
        reason = f"run {run_id} ended as {facts['status']}: {facts['status-details']}"
        _note_failure(path, reason)
        raise LaunchFailed(reason)
    return path


def clients_per_node(config: Mapping[str, Any]) -> int:
    """Return the number of clients on each node, the same for all, with at most a node a core."""
    clients = integer(config, "clients", least=1)
    nodes = range(min(clients, _cores()), 0, -1)
    return next(clients // count for count in nodes if clients % count == 0)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _exit_status(engine: Sequence[str], config: str) -> int:
    """Run a process that reads ``config``; negative where a signal ended it.

    Ctrl-C reaches it as well: it has `GRACE` seconds to write its end, unless Ctrl-C comes again.
    """
    process = subprocess.Popen(engine, stdin=subprocess.PIPE, text=True)
    try:
        process.communicate(config)
    except KeyboardInterrupt:
        print(
            f"Interrupted: the run has {GRACE} s to write its end; Ctrl-C again ends it at once",
            file=sys.stderr,
            flush=True,
        )
        try:
            process.wait(GRACE)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
    return process.returncode


def _finished(run_id: str, connection: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Stream a run's log until it has finished; what the SuperLink says of it then.

    A SuperLink that does not answer is waited for: the run goes on where its ServerApp does.
    """
    subprocess.run(
        [executable("flwr"), "log", run_id, *connection, "--stream"], check=False, env=env
    )
    heard = time.monotonic()
    while True:
        try:
            facts = _facts(run_id, connection, env)
        except (LaunchFailed, KeyError) as error:
            if time.monotonic() - heard > PATIENCE:
                raise LaunchFailed(
                    f"the SuperLink has not answered for {PATIENCE} s; run {run_id} may still go "
                    "on: look at its run directory, and at `flwr list` once the SuperLink is back"
                ) from error
        else:
            heard = time.monotonic()
            if str(facts["status"]).startswith("finished"):
                return facts
        time.sleep(3)


def _stopped(run_id: str, connection: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Stop a run, which would outlive this command; what the SuperLink says of it then."""
    try:
        answer = _answer(["stop", run_id, *connection], env)
        if not answer.get("success"):
            raise LaunchFailed(str(answer.get("error-message", answer)))
        return {**_facts(run_id, connection, env), "status-details": "interrupted"}
    except (LaunchFailed, KeyError, KeyboardInterrupt) as error:
        raise LaunchFailed(
            f"interrupted, but run {run_id} could not be stopped: it may go on and spend privacy; "
            f"{_how_to_stop(run_id, connection)} ({error})"
        ) from None


def _how_to_stop(run_id: str, connection: list[str]) -> str:
    where = "".join(f" {name}" for name in connection)
    return f"`flwr list{where}` shows it, `flwr stop {run_id}{where}` ends it"


def _facts(run_id: str, connection: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    """What the SuperLink says of a run."""
    (facts,) = _answer(["list", *connection, "--run-id", run_id], env)["runs"]
    return dict(facts)


def _note_failure(path: Path | None, reason: str) -> None:
    """Let a run directory say how the run ended, where its ServerApp could not."""
    if path is None or not (path / "run.json").is_file():
        return
    run = RunDirectory.open(path)
    with suppress(NotARun, LedgerCorrupt, OSError):  # what ended the run is what counts
        if run.facts["status"] == "running":
            run.finish("failed", reason)
            write_report(run)


def checked_settings(app: Path, settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An app's defaults, and what ``settings`` (``name=value``) change in them.

    Raises
    ------
    LaunchFailed
        There is no app, or no such setting or value of it.
    """
    project = app / "pyproject.toml"
    if not project.is_file():
        raise LaunchFailed(f"{app} holds no pyproject.toml: it is not a Flower app")
    try:
        facts = tomllib.loads(project.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LaunchFailed(f"{project} is no TOML: {error}") from None
    flwr = facts.get("tool", {}).get("flwr", {})
    defaults: dict[str, Any] = flwr.get("app", {}).get("config", {})
    return defaults, dict(_override(setting, defaults) for setting in settings)


def _begun_with(run: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on."""
    if "resume" not in defaults:
        raise LaunchFailed("the app has no setting 'resume': its runs cannot go on")
    try:
        began = RunDirectory.open(run).config
    except NotARun as error:
        raise LaunchFailed(str(error)) from None
    known = {name: value for name, value in began.items() if name in defaults}
    if known.get("state-folder") == _state_in(str(began.get("run-directory"))):
        del known["state-folder"]  # it has moved with the run
    return {**known, "run-directory": str(run.expanduser().absolute()), "resume": True}


def _absolute(config: Mapping[str, Any], *, here: bool) -> dict[str, str]:
    """The paths among an app's settings, so that every process finds the same place.

    On other machines a relative ``data-folder`` stays one, beside each node's own files.
    """
    paths = {name: str(config[name]) for name in PATHS if config.get(name)}
    if here:
        return {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}
    for name, path in paths.items():
        if name != "data-folder" and not path.startswith(("/", "~")):
            raise LaunchFailed(
                f"run-config {name}={path!r}: expected an absolute path, one on the machine where "
                "the SuperLink starts the ServerApp"
            )
    return paths


def _state_in(run: str | Path) -> str:
    """Where clients of a simulation keep their memory by default."""
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


def _answer(arguments: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    done = _flwr([*arguments, "--format", "json"], env)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise LaunchFailed(f"flwr {arguments[0]} failed: {done.stdout}{done.stderr}") from None
    return answer


def _flwr(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable("flwr"), *arguments], capture_output=True, text=True, check=False, env=env
    )


def executable(name: str) -> str:
    """Where a command of Flower is.

    Raises
    ------
    LaunchFailed
        It is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LaunchFailed(f"the command {name} was not found; pip install 'flwr[simulation]'")
    return found


def environment() -> dict[str, str]:
    """Variables for Flower's processes: they use what is installed here."""
    # The environment that runs this command has what the app needs; flwr looks there for its
    # own commands, and need not install anything.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONIOENCODING": ":replace",  # a run's log has ε, at which its stream would end
        **os.environ,
        "PATH": path,
    }


def hint_on_spaces() -> str:
    """Return what may be behind an error of a SuperLink that this environment runs, or nothing."""
    # flwr 1.41 names the folder of its tables in a list that is separated by spaces.
    if " " not in sys.prefix:
        return ""
    return (
        f"\nFlower's SuperLink finds no tables below a path with spaces, as {sys.prefix}: install "
        "into an environment elsewhere, or run with --in-process"
    )
