"""``flower-ext run``: run an app in Ray's simulation, on a SuperLink, or in one process.

Plain ``flwr run`` returns 0 for a failed run, simulates two nodes regardless of the app, and
installs the app's dependencies again unless a variable forbids it.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource

from flower_ext.cli.engines import in_one_process, on_superlink, simulation_superlink
from flower_ext.cli.preparing import Overrides, PreparedRun, RunOptions, RunsFolder, prepare
from flower_ext.cli.processes import (
    GRACE,
    Ended,
    Interrupted,
    LaunchFailed,
    RunLog,
    environment,
    signals_as_interrupts,
)
from flower_ext.cli.reaper import reaped
from flower_ext.cli.screen import console
from flower_ext.files import LAST_MOMENTS, InUse
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunWriter
from flower_ext.runs.report import write_report


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
        console.print(f"Run directory: {path}", soft_wrap=True)


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
    options = run.options
    if options.superlink is not None:
        on_superlink(options.app, run.changes, [options.superlink], env, log)
        return
    assert run.nodes is not None  # `prepare` refuses an unknown number
    if options.in_process:
        in_one_process(options.app, run.config, run.nodes, options.workers, log)
    else:
        with simulation_superlink(env) as variables:
            on_superlink(options.app, run.changes, [], variables, log, simulated=run.nodes)


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
