"""Launch a prepared run and show its log; record a failure or an interruption in its directory.

With ``--in-process``, a run is a new process; otherwise Flower's commands start it on a SuperLink.
This module makes up for properties of plain ``flwr run``, which returns 0 for a failed run,
simulates two nodes regardless of the app, and by default installs the app's dependencies again.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flower_ext.cli.preparing import PreparedRun, RunOptions
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
from flower_ext.files import LAST_MOMENTS, InUse
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunWriter
from flower_ext.runs.report import write_report

_PATIENCE = 180
"""Seconds to wait for a SuperLink that does not answer, before the command gives up."""


@signals_as_interrupts()
def launch(run: PreparedRun, *, env: Mapping[str, str] | None = None) -> Path | None:
    """Run an app and stream its log; return its run directory, or None if no setting names it.

    If the options name a SuperLink, the directory is on the machine of the ServerApp. ``env`` has
    variables for Flower's commands; by default `environment`. A failure is recorded in the run
    directory, and raises `LaunchFailed`. An interruption raises `Interrupted`, with a message that
    says how to continue the run.
    """
    options, log = run.options, RunLog()
    # A SuperLink that others started may have to outlive this command.
    ending = reaped() if options.superlink is None else nullcontext()
    try:
        with ending:
            # Only variables that are read in this block have the mark by which the reaper finds the
            # processes of this command.
            variables = env or environment()
            if options.in_process:
                _in_one_process(run, log)
            elif options.superlink is not None:
                _on_superlink(run, variables, log)
            else:
                with simulation_superlink(variables) as simulation:
                    _on_superlink(run, simulation, log)
    except KeyboardInterrupt as error:
        raise _interrupted(run, error, log.directory) from None
    except LaunchFailed as error:
        _note_failure(run, str(error))
        raise
    return run.path


def _in_one_process(run: PreparedRun, log: RunLog) -> None:
    """Run an app in one new process, which starts further workers if the options ask for them.

    After Ctrl-C the new process can still write its last files: it gets SIGTERM, and then has
    `GRACE` seconds, unless the user presses Ctrl-C again.
    """
    words = [run.options.app, run.options.workers, run.nodes]
    module = "flower_ext.federation.engines.run_app"
    program = Followed([sys.executable, "-m", module, *map(str, words)], log)
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
    # The process got SIGTERM, but this command did not.
    if status in (-signal.SIGTERM, 128 + signal.SIGTERM):
        raise Ended(signal.SIGTERM)
    if status:
        cause = f"signal {-status}" if status < 0 else "the error above"
        raise LaunchFailed(f"the run was ended by {cause}")


def _interrupted(run: PreparedRun, error: KeyboardInterrupt, named: str | None) -> Interrupted:
    """Record that a signal ended the run; return an error that says how to continue it.

    ``named`` is the path of the run directory in the run's log. The directory may be on the
    machine of the ServerApp.
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
        again = shlex.join(command_to_resume(run.options, run.path or named))
        lines.append(f"To continue it: {again}")
    return Interrupted("\n".join(lines), number)


def _note_failure(run: PreparedRun, reason: str) -> bool:
    """Record in the run directory that the run failed, and write its report.

    Return True if the directory is on this machine. A process that still writes to it gets some
    seconds to end. If it does not end, the run is still in progress or belongs to another command,
    and the function changes nothing.
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


def command_to_resume(options: RunOptions, path: Path | str | None) -> list[str]:
    """Return the arguments of a command that continues a run with the same settings."""
    words, settings = ["flower-ext", "run", str(options.app)], [*options.settings]
    words += [options.superlink] if options.superlink else []
    words += ["--in-process"] if options.in_process else []
    given: dict[str, Any] = {"--clients": options.clients}
    given["--workers"] = options.workers if options.workers > 1 else None
    if options.superlink is None:
        given["--resume"] = options.resume or path
    else:  # only the machine of the ServerApp can read the settings in the run directory
        given |= {"--preset": options.preset, "--settings": options.settings_file}
        settings += [f"run-directory={path}", "resume=true"]
    for name, value in [*given.items(), *(("--set", setting) for setting in settings)]:
        words += [name, str(value)] if value is not None else []
    return words


@contextmanager
def simulation_superlink(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a SuperLink for one simulation; yield the variables with which ``flwr`` finds it.

    ``flwr run`` starts a SuperLink that stays and that all simulations of a user share. This one
    has its own port, its own home below ``FLWR_HOME`` and no database, and ends with the block, so
    that no other run depends on it. Use it inside `reaper.reaped`, which ends Ray's processes.
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
            # A session of its own keeps the terminal's Ctrl-C away from the SuperLink, so that the
            # run ends before the SuperLink.
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

    If the options name no connection, the app runs on the SuperLink of `simulation_superlink`,
    which ends with this command. On any other SuperLink, an interruption of this command
    stops the run.
    """
    superlink, options = run.options.superlink, list[str]()
    flwr = _Flwr([] if superlink is None else [superlink], env)
    for key, value in run.changes.items():
        # TOML reads these values as JSON writes them, unless JSON escapes characters beyond U+FFFF.
        options += ["--run-config", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if superlink is None:
        federation = f"num-supernodes={run.nodes} client-resources-num-cpus=1"
        options += ["--federation-config", federation]
    try:
        answer = flwr.answer("run", str(run.options.app), options=options)
    except KeyboardInterrupt:
        if superlink is None:
            raise
        raise LaunchFailed(
            "interrupted while Flower was starting the run: the run may have started and continue; "
            + flwr.how_to_stop("ID")
        ) from None
    run_id = str(answer["run-id"])
    try:
        outcome = flwr.follow(run_id, log)
    except KeyboardInterrupt:
        if superlink is not None:
            flwr.stop(run_id)
        raise
    status, details = outcome["status"], outcome["status-details"]
    if status == "finished:stopped":
        raise LaunchFailed(f"somebody stopped run {run_id}: {details}")
    if status != "finished:completed":
        raise LaunchFailed(f"run {run_id} ended as {status}: {details}")


@dataclass(frozen=True)
class _Flwr:
    """Flower's command ``flwr`` on one SuperLink; an empty ``connection`` means the default one."""

    connection: Sequence[str]
    env: Mapping[str, str]

    def answer(self, *words: str, options: Sequence[str] = ()) -> dict[str, Any]:
        """Run a command of ``flwr``, such as ``stop RUN_ID``; return the JSON that it prints.

        If the command fails, the error is `LaunchFailed`, with the command's message.
        """
        done = subprocess.run(
            [*self._words(*words), *options, "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
            env=self.env,
        )
        try:  # if flwr fails early, it prints text despite --format
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise LaunchFailed(f"flwr {words[0]} failed: {done.stdout}{done.stderr}") from None
        if not answer.get("success"):
            raise LaunchFailed(f"flwr {words[0]} failed: {answer.get('error-message', answer)}")
        return answer

    def follow(self, run_id: str, log: RunLog) -> dict[str, Any]:
        """Show a run's log until the run has finished; return its entry in ``flwr list``."""
        program = Followed([*self._words("log", run_id), "--stream"], log, self.env)
        try:
            program.tell()
            program.wait()
        finally:
            program.process.kill()
        last_answer = time.monotonic()
        while True:
            try:
                (outcome,) = self.answer("list", options=["--run-id", run_id])["runs"]
            except LaunchFailed as error:
                # The ServerApp may still be running.
                if time.monotonic() - last_answer > _PATIENCE:
                    raise LaunchFailed(
                        f"the SuperLink has not answered for {_PATIENCE} s; run {run_id} may still "
                        "be running: look at its run directory, and run `flwr list` once the "
                        "SuperLink is back"
                    ) from error
            else:
                last_answer = time.monotonic()
                if str(outcome["status"]).startswith("finished"):
                    return dict(outcome)
            time.sleep(3)

    def stop(self, run_id: str) -> None:
        """Stop a run, because it would outlive this command and spend privacy budget."""
        try:
            self.answer("stop", run_id)
        except (LaunchFailed, KeyboardInterrupt) as error:
            raise LaunchFailed(
                f"interrupted, but run {run_id} could not be stopped: it may continue and spend "
                f"privacy budget; {self.how_to_stop(run_id)} ({error})"
            ) from None

    def how_to_stop(self, run_id: str) -> str:
        """Return a text with the commands by which a person stops a run."""
        where = "".join(f" {name}" for name in self.connection)
        return f"`flwr list{where}` shows it, `flwr stop {run_id}{where}` ends it"

    def _words(self, *words: str) -> list[str]:
        return [executable("flwr"), *words, *self.connection]
