"""Start a Flower app as ``flwr run`` does, wait for its end, and fail if the run failed.

``flwr run`` itself returns 0 for a failed run, simulates two nodes regardless of the app, and
installs the app's dependencies again unless a variable forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flower_ext.cli.ending import GRACE, LaunchFailed, interrupted, note_failure
from flower_ext.cli.engines import in_one_process, on_superlink, simulation_superlink
from flower_ext.cli.live import RunView
from flower_ext.cli.preparing import Prepared, RunOptions, prepare
from flower_ext.cli.processes import ProcessFailed, environment
from flower_ext.cli.reaper import reaped


def launch(
    app: Path,
    *,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    **options: Any,
) -> Path | None:
    """Run an app and stream its log; return its run directory, if it has one on this machine.

    Parameters
    ----------
    app : Path
        Folder with the app's ``pyproject.toml``.
    env : Mapping[str, str], optional
        Variables for Flower's commands; by default `environment`.
    command : Sequence[str], optional
        First words of the command that continues an interrupted run, for the message about it; by
        default ``flower-ext run`` with the options.
    **options
        Further fields of `RunOptions`.

    Raises
    ------
    LaunchFailed
        A setting is unknown, there is no run to resume, ``flwr run`` refused, or the run failed.
    Interrupted
        Ctrl-C, SIGTERM or SIGHUP ended the run; the message says how to continue it.
    UnfitSetting
        The numbers of clients in the settings do not fit each other.
    """
    chosen = RunOptions(app=app, **options)
    run = prepare(chosen)
    path, patience = run.path, GRACE if chosen.superlink else 5
    view = RunView(path if chosen.is_local else None, run.config)
    # A SuperLink that others started may have to outlive this command.
    ending = reaped() if chosen.superlink is None else nullcontext()
    try:
        with ending, view:
            _run(chosen, run, env or environment(), view)
    except KeyboardInterrupt as error:
        again = None
        if run.resumable:
            again = [*(command or _words(chosen)), *_to_resume(chosen, path or view.named)]
        local = path if chosen.is_local or (path and path.exists()) else None
        raise interrupted(error, local, view.named, again, patience=patience) from None
    except (LaunchFailed, ProcessFailed) as error:
        note_failure(path, str(error), patience=patience)
        raise
    return path


def _run(options: RunOptions, run: Prepared, env: Mapping[str, str], view: RunView) -> None:
    """Run a prepared run on the engine of its options."""
    app = options.app
    if options.is_in_process:
        assert run.nodes is not None  # `prepare` refuses an unknown number
        in_one_process(app, run.config, run.nodes, options.workers, view)
    elif options.superlink is not None:
        on_superlink(app, run.changes, [options.superlink], env, view)
    else:
        with simulation_superlink(env) as variables:
            on_superlink(app, run.changes, [], variables, view, simulated=run.nodes)


def _words(options: RunOptions) -> list[str]:
    """Return the words of ``flower-ext run`` with these options, without the settings."""
    superlink = [] if options.superlink is None else [options.superlink]
    words = ["flower-ext", "run", str(options.app), *superlink]
    workers = options.workers if options.is_in_process else None
    for name, value in (("--nodes", options.nodes), ("--workers", workers)):
        words += [] if value is None else [name, str(value)]
    return words


def _to_resume(options: RunOptions, path: Path | str | None) -> list[str]:
    """Return the options with which a command continues a run.

    The run directory has the settings that the run began with. They are repeated only if this
    machine cannot read that directory.
    """
    words = ["--in-process"] if options.is_in_process else []
    changes = [*options.settings]
    if options.is_local:
        words += ["--resume", str(path)]
        changes = [] if options.resume is None else changes
    else:  # only the machine of the ServerApp can read the run directory
        changes += [f"run-directory={path}", "resume=true"]
    return [*words, *(word for setting in changes for word in ("--set", setting))]
