"""The two ways to run an app: in one process of ours, or by Flower's commands on a SuperLink."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_ext.cli.ending import GRACE, Ended, LaunchFailed
from flower_ext.cli.live import RunView
from flower_ext.cli.processes import executable, hint_on_spaces

_PROGRAM = "flower_ext.federation.engines.run_app"
"""The program of a run in one process; apart from this one, so that Ctrl-C leaves it time."""

PATIENCE = 180
"""Seconds to wait for a SuperLink that does not answer."""

_LOOK_EVERY = 5
"""Seconds between two looks at what a run needs."""


def in_one_process(app: Path, config: Mapping[str, Any], workers: int, view: RunView) -> None:
    """Run an app in one process, with ``workers`` - 1 beside it.

    An interruption is passed on as SIGTERM; the run then has `GRACE` seconds to write its end,
    unless Ctrl-C comes again.

    Raises
    ------
    LaunchFailed
        The run failed.
    KeyboardInterrupt
        It was interrupted, and has ended.
    """
    command = [sys.executable, "-m", _PROGRAM, str(app), str(workers)]
    # A terminal sends these to all its processes: this one passes them on, once.
    program = view.follow(command, ignored=(signal.SIGINT, signal.SIGHUP))
    try:
        program.tell(json.dumps(dict(config)))
        status = program.wait()
    except KeyboardInterrupt:
        view.close()
        print(
            f"Interrupted: the run has {GRACE} s to write its end; Ctrl-C again ends it at once",
            file=sys.stderr,
            flush=True,
        )
        program.process.terminate()
        try:
            program.wait(GRACE)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            program.process.kill()
            program.wait()
        raise
    if status == -signal.SIGTERM:  # somebody ended that process alone
        raise Ended(signal.SIGTERM)
    if status < 0:
        raise LaunchFailed(f"the run was ended by signal {-status}")
    if status == 128 + signal.SIGTERM:
        raise Ended(signal.SIGTERM)
    if status:
        raise LaunchFailed("the run ended with the error above")


def on_superlink(
    app: Path,
    changes: Mapping[str, Any],
    connection: Sequence[str],
    env: Mapping[str, str],
    view: RunView,
    *,
    simulated: int | None = None,
    watch: Callable[[], None] | None = None,
) -> None:
    """Run an app on the SuperLink that a connection names; ``env`` has Flower's default.

    Parameters
    ----------
    changes : Mapping[str, Any]
        Run-config overrides.
    connection : Sequence[str]
        Its name, or nothing for the default one.
    simulated : int, optional
        Nodes to simulate, on a SuperLink of this command's own, which ends with it.
    watch : Callable[[], None], optional
        Called every few seconds; the run is given up where it raises.

    Raises
    ------
    LaunchFailed
        Flower refused the run, or the run failed.
    KeyboardInterrupt
        It was interrupted; on a SuperLink of others the run was stopped first.
    """
    command = ["run", str(app), *connection]
    for key, value in changes.items():
        # As TOML, which is JSON here but for escapes beyond the first plane.
        command += ["--run-config", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if simulated is not None:
        federation = f"num-supernodes={simulated} client-resources-num-cpus=1"
        command += ["--federation-config", federation]
    own = simulated is not None
    try:
        answer = _answer(command, env)
    except KeyboardInterrupt:
        if own:
            raise
        raise LaunchFailed(
            "interrupted while the run was being started: if it was, it goes on; "
            + _how_to_stop("ID", connection)
        ) from None
    if not answer.get("success"):
        hint = hint_on_spaces() if own else ""
        raise LaunchFailed(f"flwr run refused: {answer.get('error-message', answer)}{hint}")
    run_id = str(answer["run-id"])
    try:
        facts = _finished(run_id, connection, env, view, watch)
    except KeyboardInterrupt:
        view.close()
        if not own:
            _stop(run_id, connection, env)
        raise
    if facts["status"] == "finished:stopped":
        raise LaunchFailed(f"run {run_id} was stopped by somebody: {facts['status-details']}")
    if facts["status"] != "finished:completed":
        raise LaunchFailed(f"run {run_id} ended as {facts['status']}: {facts['status-details']}")


def _finished(
    run_id: str,
    connection: Sequence[str],
    env: Mapping[str, str],
    view: RunView,
    watch: Callable[[], None] | None,
) -> dict[str, Any]:
    """Stream a run's log until it has finished; return what the SuperLink says of it then.

    A SuperLink that does not answer is waited for: the run goes on where its ServerApp does.
    """
    words = [executable("flwr"), "log", run_id, *connection, "--stream"]
    program = view.follow(words, env=env, ignored=(signal.SIGINT, signal.SIGHUP))
    try:
        program.tell()
        while not program.ended(_LOOK_EVERY):
            if watch is not None:
                watch()
    finally:
        program.process.kill()
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


def _stop(run_id: str, connection: Sequence[str], env: Mapping[str, str]) -> None:
    """Stop a run, which would outlive this command."""
    try:
        answer = _answer(["stop", run_id, *connection], env)
        if not answer.get("success"):
            raise LaunchFailed(str(answer.get("error-message", answer)))
    except (LaunchFailed, KeyError, KeyboardInterrupt) as error:
        raise LaunchFailed(
            f"interrupted, but run {run_id} could not be stopped: it may go on and spend privacy; "
            f"{_how_to_stop(run_id, connection)} ({error})"
        ) from None


def _how_to_stop(run_id: str, connection: Sequence[str]) -> str:
    where = "".join(f" {name}" for name in connection)
    return f"`flwr list{where}` shows it, `flwr stop {run_id}{where}` ends it"


def _facts(run_id: str, connection: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the SuperLink says of a run."""
    (facts,) = _answer(["list", *connection, "--run-id", run_id], env)["runs"]
    return dict(facts)


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
