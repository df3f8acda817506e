"""Start a Flower app as ``flwr run`` does, wait for its end, and fail if the run failed.

``flwr run`` itself returns 0 for a failed run, simulates two nodes regardless of the app, and
installs the app's dependencies again unless a variable forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from flower_ext.cli.ending import GRACE, LaunchFailed, interrupted, note_failure
from flower_ext.cli.engines import in_one_process, on_superlink, simulation_superlink
from flower_ext.cli.live import RunView
from flower_ext.cli.preparing import PreparedRun, RunOptions
from flower_ext.cli.processes import ProcessFailed, environment
from flower_ext.cli.reaper import reaped


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
    options, path = run.options, run.path
    patience = GRACE if options.superlink else 5
    view = RunView(path if options.is_local else None, run.config)
    # A SuperLink that others started may have to outlive this command.
    ending = reaped() if options.superlink is None else nullcontext()
    try:
        with ending, view:
            _run(run, env or environment(), view)
    except KeyboardInterrupt as error:
        again = None
        if "resume" in run.config:  # the app's runs can be resumed
            again = _words_to_resume(options, path or view.named)
        local = path if options.is_local or (path and path.exists()) else None
        raise interrupted(error, local, view.named, again, patience=patience) from None
    except (LaunchFailed, ProcessFailed) as error:
        note_failure(path, str(error), patience=patience)
        raise
    return path


def _run(run: PreparedRun, env: Mapping[str, str], view: RunView) -> None:
    """Run a prepared run on the engine of its options."""
    options = run.options
    if options.superlink is not None:
        on_superlink(options.app, run.changes, [options.superlink], env, view)
        return
    assert run.nodes is not None  # `prepare` refuses an unknown number
    if options.in_process:
        in_one_process(options.app, run.config, run.nodes, options.workers, view)
    else:
        with simulation_superlink(env) as variables:
            on_superlink(options.app, run.changes, [], variables, view, simulated=run.nodes)


def _words_to_resume(options: RunOptions, path: Path | str | None) -> list[str]:
    """Return the words of the command that continues a run.

    The run directory has the settings that the run began with. They are repeated only if this
    machine cannot read that directory.
    """
    words = [*options.command] or ["flower-ext", "run", str(options.app)]
    if not options.command and options.superlink is not None:
        words.append(options.superlink)
    if options.in_process:
        words += ["--in-process", "--workers", str(options.workers)]
    if options.clients is not None:
        words += ["--clients", str(options.clients)]
    if options.is_local:
        words += ["--resume", str(path)]
        changes = () if options.resume is None else options.settings
    else:  # only the machine of the ServerApp can read the run directory
        changes = (*options.settings, f"run-directory={path}", "resume=true")
    return [*words, *(word for setting in changes for word in ("--set", setting))]
