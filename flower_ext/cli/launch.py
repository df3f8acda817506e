"""Start a Flower app as ``flwr run`` does, wait for its end, and fail if the run failed.

``flwr run`` itself returns 0 for a failed run, simulates two nodes regardless of the app, and
installs the app's dependencies again unless a variable forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from flower_ext.cli.ending import GRACE, LaunchFailed, interrupted, note_failure
from flower_ext.cli.engines import in_one_process, on_superlink
from flower_ext.cli.live import RunView
from flower_ext.cli.preparing import prepare
from flower_ext.cli.processes import ProcessFailed, environment
from flower_ext.cli.reaper import reaped
from flower_ext.cli.simulation import cluster_watch, simulation_superlink


def launch(
    app: Path,
    *,
    superlink: str | None = None,
    nodes: int | None = None,
    settings: Sequence[str] = (),
    runs: Path | None = None,
    in_process: bool = False,
    clients: int | None = None,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    resume: Path | None = None,
    ray: str | None = None,
    command: Sequence[str] | None = None,
) -> Path | None:
    """Run an app and stream its log; return its run directory, if it has one on this machine.

    Parameters
    ----------
    app : Path
        Folder with the app's ``pyproject.toml``.
    superlink : str, optional
        Connection of Flower's configuration; by default the local simulation.
    nodes : int, optional
        Number of nodes to simulate, for an app that has no setting for it. With ``superlink``:
        the number of that SuperLink's nodes, which also sets the app's number of clients. Give it
        only if all processes of the SuperLink see the files of this machine.
    settings : Sequence[str]
        Run-config overrides, ``name=value``. Relative paths start at the current folder. If the
        SuperLink may be on another machine, a relative path to write to is refused.
    runs : Path, optional
        Folder in which the run directory is created; by default ``runs``. If the SuperLink may be
        on another machine, the app chooses the folder by default.
    in_process : bool
        Run all clients in one process without Ray, and train the clients of a round in batches.
    clients : int, optional
        Number of clients, as the value of the app's setting for it; implies ``in_process``.
    workers : int
        Number of processes that share the clients of a run with ``in_process``.
    env : Mapping[str, str], optional
        Variables for Flower's commands; by default `environment`.
    resume : Path, optional
        Run directory of a run to continue, under the settings that it began with.
    ray : str, optional
        Address ``host:port`` of a Ray cluster that simulates the clients.
    command : Sequence[str], optional
        First words of the command that continues an interrupted run, for the message about it; by
        default ``flower-ext run`` with the options above.

    Returns
    -------
    Path or None
        The run directory; None if the app has none on this machine.

    Raises
    ------
    LaunchFailed
        A setting is unknown, there is no run to resume, ``flwr run`` refused, or the run failed.
    Interrupted
        Ctrl-C, SIGTERM or SIGHUP ended the run; the message says how to continue it.
    UnfitSetting
        The numbers of clients in the settings do not fit each other.
    """
    in_process = in_process or clients is not None
    run = prepare(
        app,
        superlink=superlink,
        nodes=nodes,
        settings=settings,
        runs=runs,
        in_process=in_process,
        clients=clients,
        workers=workers,
        resume=resume,
        ray=ray,
    )
    path, patience = run.path, GRACE if superlink else 5
    view = RunView(path if run.here else None, run.config)
    # A SuperLink that others started may have to outlive this command.
    ending = reaped() if superlink is None else nullcontext()
    try:
        with ending, view:
            if env is None:
                env = environment()
            if in_process:
                assert run.nodes is not None  # `prepare` refuses an unknown number
                in_one_process(app, run.config, run.nodes, workers, view)
            elif superlink is not None:
                on_superlink(app, run.changes, [superlink], env, view)
            else:
                watch = None if ray is None else cluster_watch(ray)
                with simulation_superlink(env, ray=ray) as own:
                    on_superlink(app, run.changes, [], own, view, simulated=run.nodes, watch=watch)
    except KeyboardInterrupt as error:
        again = None
        if run.resumable:
            options = {"--ray": ray, "--nodes": nodes, "--workers": workers if in_process else None}
            again = [*(command or _words(app, superlink, options))]
            again += ["--in-process"] if in_process else []
            again += _to_resume(path or view.named, settings, here=run.here, first=resume is None)
        local = path if run.here or (path and path.exists()) else None
        raise interrupted(error, local, view.named, again, patience=patience) from None
    except (LaunchFailed, ProcessFailed) as error:
        note_failure(path, str(error), patience=patience)
        raise
    return path


def _words(app: Path, superlink: str | None, options: Mapping[str, object]) -> list[str]:
    """Return the words of ``flower-ext run`` with the options that are not None."""
    words = ["flower-ext", "run", str(app), *([] if superlink is None else [superlink])]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return words


def _to_resume(
    path: Path | str | None, settings: Sequence[str], *, here: bool, first: bool
) -> list[str]:
    """Return the options with which a command continues a run.

    The run directory has the settings that the run began with. They are repeated only if this
    machine cannot read that directory.
    """
    if here:
        told, changed = ["--resume", str(path)], () if first else settings
    else:  # only the machine of the ServerApp can read the run directory
        told, changed = [], [*settings, f"run-directory={path}", "resume=true"]
    return [*told, *(word for setting in changed for word in ("--set", setting))]
