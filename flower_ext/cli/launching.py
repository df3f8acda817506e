"""Launch a prepared run and show its log; record a failure or an interruption in its directory.

With ``--in-process``, a run is a new process; otherwise it runs on a SuperLink (`cli.superlink`).
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from flower_ext.cli.preparing import PreparedRun, RunOptions
from flower_ext.cli.processes import (
    GRACE,
    Ended,
    Followed,
    Interrupted,
    LaunchFailed,
    RunLog,
    environment,
    signals_as_interrupts,
)
from flower_ext.cli.reaper import reaped
from flower_ext.cli.superlink import run_on_superlink, simulation_superlink
from flower_ext.files import LAST_MOMENTS, InUse
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunWriter
from flower_ext.runs.report import write_report


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
                run_on_superlink(run, variables, log)
            else:
                with simulation_superlink(variables) as simulation:
                    run_on_superlink(run, simulation, log)
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
