"""``flower-ext deploy``: run an app on a SuperLink and SuperNodes started for this run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from flower_ext.cli.deployment import CONNECTION, Deployment
from flower_ext.cli.ending import signals_as_interrupts
from flower_ext.cli.launch import launch
from flower_ext.cli.preparing import begun_with
from flower_ext.cli.project import checked_settings
from flower_ext.cli.reaper import reaped
from flower_ext.cli.run_command import AppFolder, Resume, Runs
from flower_ext.cli.screen import Settings, console
from flower_ext.runs.directory import new_run_path


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
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the SuperLink; 0 picks a free one.")
    ] = 0,
    resume: Resume = None,
) -> None:
    """Run an app on a SuperLink and SuperNodes of this machine, with TLS and registered keys.

    The command rehearses the deployment of docs/deploy.md on loopback, and ends every process that
    it started. Clients keep their memory in the run directory, so that --resume works.

    Example: flower-ext deploy apps/dp2-fedsam --nodes 4 --set rounds=3
    """
    given = list(settings or ())
    defaults, changes = checked_settings(
        app_folder, given
    )  # fail now, not after a minute of starting
    if resume is not None:
        begun_with(resume, app_folder, defaults)
    place = resume or changes.get("run-directory") or defaults.get("run-directory")
    if not place and "run-directory" in defaults:
        name = str({**defaults, **changes}.get("method", app_folder.name))
        place = new_run_path(runs.absolute(), name, datetime.now(UTC))
        given.append(f"run-directory={place}")
    with signals_as_interrupts(), TemporaryDirectory() as temporary, reaped():
        home = folder or Path(temporary)
        state = Path(place or home).expanduser().absolute() / "state"
        deployment = Deployment(home, nodes, {"state-folder": str(state)}, port)
        again = ["flower-ext", "deploy", str(app_folder), "--nodes", str(nodes)]
        again += [] if folder is None else ["--folder", str(folder)]
        with deployment:
            console.print(f"SuperLink on port {deployment.port}, {nodes} SuperNodes online")
            path = launch(
                app_folder,
                superlink=CONNECTION,
                nodes=nodes,
                settings=given,
                runs=runs,
                env=deployment.env,
                resume=resume,
                command=again,
            )
    if path is not None:
        console.print(f"Report: {path / 'report.html'}", soft_wrap=True)
