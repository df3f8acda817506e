"""``flower-ext deploy``: run an app on a SuperLink and SuperNodes started for this run."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from flower_ext.cli.deployment import CONNECTION, Deployment
from flower_ext.cli.ending import signals_as_interrupts
from flower_ext.cli.launch import launch
from flower_ext.cli.preparing import RunOptions, prepare
from flower_ext.cli.reaper import reaped
from flower_ext.cli.run_command import AppFolder, Resume, Runs
from flower_ext.cli.screen import Settings, console


def deploy(
    app_folder: AppFolder,
    nodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes.")] = 4,
    settings: Settings = None,
    runs: Runs = Path("runs"),
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps certificates, keys, database and logs; by default, a temporary "
            "folder that is deleted at the end."
        ),
    ] = None,
    resume: Resume = None,
) -> None:
    """Run an app on a SuperLink and SuperNodes of this machine, with TLS and registered keys.

    The command rehearses the deployment of docs/deploy.md on loopback, and ends every process that
    it started. Clients keep their memory in the run directory, so that --resume works.

    Example: flower-ext deploy apps/dp2-fedsam --nodes 4 --set rounds=3
    """
    run = prepare(  # fail now, not after a minute of starting
        RunOptions(
            app=app_folder,
            superlink=CONNECTION,
            nodes=nodes,
            settings=settings or (),
            runs=runs,
            resume=resume,
        )
    )
    with signals_as_interrupts(), TemporaryDirectory() as temporary, reaped():
        home = folder or Path(temporary)
        state = (run.path or home.absolute()) / "state"
        with Deployment(home, nodes, {"state-folder": str(state)}) as deployment:
            console.print(f"SuperLink on port {deployment.port}, {nodes} SuperNodes online")
            path = launch(run, env=deployment.env)
    if path is not None:
        console.print(f"Report: {path / 'report.html'}", soft_wrap=True)
