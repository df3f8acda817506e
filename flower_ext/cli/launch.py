"""Start a Flower app as ``flwr run`` does, wait for it, and fail when it failed.

``flwr run`` itself returns 0 for a run that failed, starts two simulated nodes whatever the app
needs, and installs the app's dependencies afresh unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flower_ext.cli.ending import GRACE, LaunchFailed, interrupted, note_failure
from flower_ext.cli.engines import in_one_process, on_superlink
from flower_ext.cli.live import RunView
from flower_ext.cli.preparing import prepare
from flower_ext.cli.processes import ProcessFailed, environment
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
    """Run an app, streaming its log; return its run directory, where the app has one here.

    Parameters
    ----------
    app : Path
        Folder with the app's ``pyproject.toml``.
    superlink : str, optional
        Connection of Flower's configuration. None is the local simulation.
    nodes : int, optional
        Number of nodes, for an app without a setting for it. With ``superlink``: the number of
        its nodes, and the value of that setting; given for a SuperLink of this machine alone,
        whose processes see the same files.
    settings : Sequence[str]
        Run-config overrides, ``name=value``. Relative paths start here; one to write to is refused
        where the SuperLink may be on another machine.
    runs : Path, optional
        Folder in which the run directory is made; by default ``runs``. A SuperLink that may be on
        another machine chooses for itself by default.
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
    ray : str, optional
        Address of a Ray cluster that simulates the clients.
    command : Sequence[str], optional
        The command line that a resumed run begins with; by default ``flower-ext run`` with the
        options above.

    Raises
    ------
    LaunchFailed
        Unknown setting, no run to resume, ``flwr run`` refused, or the run ended in failure.
    Interrupted
        Ctrl-C or SIGTERM ended the run; the message says how to go on with it.
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
    if env is None:
        env = environment()
    view = RunView(path if run.here else None, run.config)
    try:
        with view:
            if in_process:
                in_one_process(app, run.config, workers, view)
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
    """Return what a command needs to go on with a run; the run itself says how it began."""
    if here:
        told, changed = ["--resume", str(path)], () if first else settings
    else:  # only the machine of the ServerApp can read it
        told, changed = [], [*settings, f"run-directory={path}", "resume=true"]
    return [*told, *(word for setting in changed for word in ("--set", setting))]
