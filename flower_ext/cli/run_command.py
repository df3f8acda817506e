"""``flower-ext run``: run an app in Ray's simulation, on a SuperLink, or in one process.

Plain ``flwr run`` returns 0 for a failed run, simulates two nodes regardless of the app, and
installs the app's dependencies again unless a variable forbids it.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from click.core import ParameterSource

from flower_ext.cli.preparing import Overrides, PreparedRun, RunOptions, RunsFolder, prepare
from flower_ext.cli.processes import (
    GRACE,
    HOST,
    Ended,
    Followed,
    Interrupted,
    LaunchFailed,
    RunLog,
    end_groups,
    environment,
    executable,
    free_port,
    signals_as_interrupts,
    wait_for_port,
)
from flower_ext.cli.reaper import reaped
from flower_ext.cli.screen import say
from flower_ext.files import LAST_MOMENTS, InUse
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunWriter
from flower_ext.runs.report import write_report

_PROGRAM = "flower_ext.federation.engines.run_app"
"""Module that a run in one process executes.

It runs in a process of its own, so that after Ctrl-C the run can still write its last files.
"""

PATIENCE = 180
"""Seconds to wait for a SuperLink that does not answer, before the command gives up."""


def run(
    ctx: typer.Context,
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")],
    superlink: Annotated[
        str | None,
        typer.Argument(
            help="Connection of Flower's configuration; by default the local simulation."
        ),
    ] = None,
    settings: Overrides = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Setting of a paper, as `flower-ext settings APP --presets` lists them."),
    ] = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="File of settings; --set changes them.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Train all clients in one process, in batches, without Ray."
        ),
    ] = False,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Number of clients."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of processes that share an --in-process run.")
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run directory of a run to continue; --set rounds=N extends the run."),
    ] = None,
) -> None:
    """Run a Flower app, show its log, and exit with 1 if the run failed.

    Example: flower-ext run apps/dp2-fedsam --in-process --clients 200 --set rounds=20
    """
    # A SuperLink may be on another machine, for which FLOWER_EXT_RUNS and the default of --runs
    # were not meant. There, only an explicit --runs counts.
    meant = ctx.get_parameter_source("runs") is ParameterSource.COMMANDLINE
    options = RunOptions(
        app=app_folder,
        superlink=superlink,
        clients=clients,
        preset=preset,
        settings_file=settings_file,
        settings=settings or (),
        runs=runs if meant or superlink is None else None,
        in_process=in_process,
        workers=workers,
        resume=resume,
    )
    with signals_as_interrupts():
        path = launch(prepare(options))
    if path is not None and (path / "run.json").is_file():
        RunWriter.open(path).note(app=str(app_folder.absolute()))  # for export
    if path is not None and superlink is None:
        say(f"Run directory: {path}")


def launch(run: PreparedRun, *, env: Mapping[str, str] | None = None) -> Path | None:
    """Run an app and stream its log; return its run directory, if it has one on this machine.

    Parameters
    ----------
    run : PreparedRun
    env : Mapping[str, str], optional
        Variables for Flower's commands; by default `environment`.

    Raises
    ------
    LaunchFailed
        ``flwr run`` refused, or the run failed.
    Interrupted
        Ctrl-C, SIGTERM or SIGHUP ended the run; the message says how to continue it.
    """
    options = run.options
    log = RunLog()
    # A SuperLink that others started may have to outlive this command.
    ending = reaped() if options.superlink is None else nullcontext()
    try:
        with ending:
            _run(run, env or environment(), log)
    except KeyboardInterrupt as error:
        raise _interrupted(run, error, log.directory) from None
    except LaunchFailed as error:
        _note_failure(run, str(error))
        raise
    return run.path


def _run(run: PreparedRun, env: Mapping[str, str], log: RunLog) -> None:
    if run.options.in_process:
        _in_one_process(run, log)
    elif run.options.superlink is not None:
        _on_superlink(run, env, log)
    else:
        with simulation_superlink(env) as variables:
            _on_superlink(run, variables, log)


def _in_one_process(run: PreparedRun, log: RunLog) -> None:
    """Run an app in one new process, which starts further workers if the options ask for them.

    The function passes an interruption on as SIGTERM. The run then has `GRACE` seconds to write
    its last files, unless Ctrl-C comes again.

    Raises
    ------
    LaunchFailed
        The run failed.
    KeyboardInterrupt
        The run was interrupted, and its process has ended.
    """
    words = [run.options.app, run.options.workers, run.nodes]
    command = [sys.executable, "-m", _PROGRAM, *map(str, words)]
    program = Followed(command, log)
    try:
        program.tell(json.dumps(dict(run.config)))
        status = program.wait()
    except KeyboardInterrupt:
        print(
            f"Interrupted: the run has {GRACE} s to write its last files; Ctrl-C again ends it now",
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
    if status in (-signal.SIGTERM, 128 + signal.SIGTERM):  # sent to that process only
        raise Ended(signal.SIGTERM)
    if status:
        cause = f"signal {-status}" if status < 0 else "the error above"
        raise LaunchFailed(f"the run was ended by {cause}")


@contextmanager
def simulation_superlink(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a SuperLink for one simulation; yield the variables with which ``flwr`` finds it.

    ``flwr run`` starts a SuperLink that stays and that all simulations of a user share. The
    SuperLink of this function has its own port and home and no database, and ends with the block,
    so that no other run depends on it. Use the function inside `flower_ext.cli.reaper.reaped`,
    which ends Ray's processes.

    ``env`` holds the environment variables of Flower's processes. The SuperLink's home is a folder
    below ``FLWR_HOME``.

    Raises
    ------
    LaunchFailed
        The SuperLink does not start.
    """
    base = Path(env.get("FLWR_HOME") or Path.home() / ".flwr").expanduser().absolute()
    base.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="simulation-", dir=base, ignore_cleanup_errors=True) as home:
        port, log = free_port(), Path(home, "superlink.log")
        Path(home, "config.toml").write_text(
            f'[superlink]\ndefault = "simulation"\n\n'
            f'[superlink.simulation]\naddress = "{HOST}:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        env = {**env, "FLWR_HOME": home}
        words = [executable("flower-superlink"), "--insecure", "--simulation"]
        words += ["--isolation", "subprocess", "--host", HOST, "--port", str(port)]
        with log.open("wb") as stream:
            # Its own session keeps the terminal's Ctrl-C away from the SuperLink, so that the run
            # ends first.
            process = subprocess.Popen(
                words, env=env, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            wait_for_port(port, process, log)
            yield env
        finally:
            end_groups([process])


def _on_superlink(run: PreparedRun, env: Mapping[str, str], log: RunLog) -> None:
    """Run an app on the SuperLink that a connection of Flower's configuration names.

    A run without such a connection uses the default one, which is that of `simulation_superlink`.
    This SuperLink simulates the run's nodes, and ends with this command.

    Raises
    ------
    LaunchFailed
        Flower refused the run, or the run failed.
    KeyboardInterrupt
        The caller was interrupted. If the SuperLink outlives this command, the run was stopped.
    """
    superlink = run.options.superlink
    connection = [] if superlink is None else [superlink]
    command = ["run", str(run.options.app), *connection]
    for key, value in run.changes.items():
        # TOML reads these values as JSON writes them, unless JSON escapes characters beyond U+FFFF.
        command += ["--run-config", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if superlink is None:
        federation = f"num-supernodes={run.nodes} client-resources-num-cpus=1"
        command += ["--federation-config", federation]
    try:
        answer = _answer(command, env)
    except KeyboardInterrupt:
        if superlink is None:
            raise
        raise LaunchFailed(
            "interrupted while Flower was starting the run: the run may have started and continue; "
            + _how_to_stop("ID", connection)
        ) from None
    if not answer.get("success"):
        raise LaunchFailed(f"flwr run failed: {answer.get('error-message', answer)}")
    run_id = str(answer["run-id"])
    try:
        outcome = _finished(run_id, connection, env, log)
    except KeyboardInterrupt:
        if superlink is not None:
            _stop(run_id, connection, env)
        raise
    if outcome["status"] == "finished:stopped":
        raise LaunchFailed(f"somebody stopped run {run_id}: {outcome['status-details']}")
    if outcome["status"] != "finished:completed":
        raise LaunchFailed(
            f"run {run_id} ended as {outcome['status']}: {outcome['status-details']}"
        )


def _finished(
    run_id: str, connection: Sequence[str], env: Mapping[str, str], log: RunLog
) -> dict[str, Any]:
    """Stream a run's log until the run has finished; return the SuperLink's entry for the run.

    The function waits up to `PATIENCE` seconds for a SuperLink that does not answer, because the
    ServerApp may still be running.
    """
    words = [executable("flwr"), "log", run_id, *connection, "--stream"]
    program = Followed(words, log, env)
    try:
        program.tell()
        program.wait()
    finally:
        program.process.kill()
    last_answer = time.monotonic()
    while True:
        try:
            (outcome,) = _answer(["list", *connection, "--run-id", run_id], env)["runs"]
        except (LaunchFailed, KeyError) as error:
            if time.monotonic() - last_answer > PATIENCE:
                raise LaunchFailed(
                    f"the SuperLink has not answered for {PATIENCE} s; run {run_id} may still be "
                    "running: look at its run directory, and run `flwr list` once the SuperLink is "
                    "back"
                ) from error
        else:
            last_answer = time.monotonic()
            if str(outcome["status"]).startswith("finished"):
                return dict(outcome)
        time.sleep(3)


def _stop(run_id: str, connection: Sequence[str], env: Mapping[str, str]) -> None:
    try:  # the run would outlive this command, and spend privacy budget
        answer = _answer(["stop", run_id, *connection], env)
        if not answer.get("success"):
            raise LaunchFailed(str(answer.get("error-message", answer)))
    except (LaunchFailed, KeyError, KeyboardInterrupt) as error:
        raise LaunchFailed(
            f"interrupted, but run {run_id} could not be stopped: it may continue and spend "
            f"privacy budget; {_how_to_stop(run_id, connection)} ({error})"
        ) from None


def _how_to_stop(run_id: str, connection: Sequence[str]) -> str:
    where = "".join(f" {name}" for name in connection)
    return f"`flwr list{where}` shows it, `flwr stop {run_id}{where}` ends it"


def _answer(arguments: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [executable("flwr"), *arguments, "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    try:  # where flwr fails early, it prints text in spite of --format
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise LaunchFailed(f"flwr {arguments[0]} failed: {done.stdout}{done.stderr}") from None
    return answer


def _interrupted(run: PreparedRun, error: KeyboardInterrupt, named: str | None) -> Interrupted:
    """Record that a signal ended the run; return an error that says how to continue it.

    ``named`` is the run directory that the log names. It may be on the ServerApp's machine.
    """
    number = error.number if isinstance(error, Ended) else int(signal.SIGINT)
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    sentence = f"the run was interrupted by {how}"
    is_here = run.path is not None and (run.options.superlink is None or run.path.exists())
    if is_here and _note_failure(run, sentence):
        lines = [sentence, f"Run directory: {run.path} (see report.html)"]
    elif not is_here and named is not None:
        lines = [sentence, f"Run directory, on the machine of its ServerApp: {named}"]
    else:
        return Interrupted(f"{sentence} before it began; nobody's data were used", number)
    if "resume" in run.config:  # the app's runs can be resumed
        again = shlex.join(_words_to_resume(run.options, run.path or named))
        lines.append(f"To continue it: {again}")
    return Interrupted("\n".join(lines), number)


def _note_failure(run: PreparedRun, reason: str) -> bool:
    """Record in the run directory that the run failed, and write its report.

    A process that still writes to the directory has some seconds to end. If it does not, the run
    continues or belongs to another command, and the function changes nothing.

    Returns
    -------
    bool
        True if there is such a run directory on this machine.
    """
    if run.path is None or not (run.path / "run.json").is_file():
        return False
    directory = RunWriter.open(run.path)
    with suppress(NotARun, LedgerCorrupt, InUse, OSError):  # these must not hide the run's error
        directory.check_free(seconds=GRACE if run.options.superlink else LAST_MOMENTS)
        if directory.status == "running":
            directory.finish("failed", reason)
        if directory.status == "failed":
            write_report(directory)
    return True


def _words_to_resume(options: RunOptions, path: Path | str | None) -> list[str]:
    """Return the command that continues a run: this command, with the path of the run."""
    words = ["flower-ext", *sys.argv[1:]]
    if sys.argv[1:2] != ["run"]:  # another command started the run
        words = ["flower-ext", "run", str(options.app)]
        words += [options.superlink] if options.superlink else []
        words += ["--in-process"] if options.in_process else []
    if options.resume is not None:
        return words
    if options.superlink is None:
        return [*words, "--resume", str(path)]
    # Only the machine of the ServerApp can read the run directory.
    return [*words, "--set", f"run-directory={path}", "--set", "resume=true"]
