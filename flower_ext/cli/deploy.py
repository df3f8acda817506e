"""``flower-ext deploy``: an app on a SuperLink and SuperNodes that are started for it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from flower_ext.cli.deployment import CONNECTION, Deployment
from flower_ext.cli.launch import checked_settings, launch
from flower_ext.cli.run import AppFolder, Runs
from flower_ext.cli.screen import Settings, console


def deploy(
    app_folder: AppFolder,
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 4,
    settings: Settings = None,
    runs: Runs = Path("runs"),
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where certificates, keys, database and logs are, and stay; by default nowhere."
        ),
    ] = None,
) -> None:
    """Run an app on a SuperLink and SuperNodes of this machine, with TLS and registered keys.

    Everything that is started is ended again: a rehearsal of docs/deploy.md on loopback.

    Example: flower-ext deploy apps/dp2-fedsam --nodes 4 --set rounds=3
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended from outside: end them as well
    with TemporaryDirectory() as temporary:
        deployment = Deployment(folder or Path(temporary), nodes)
        checked_settings(app_folder, settings or ())  # not after a minute of starting
        with deployment:
            console.print(f"SuperLink on port {deployment.port}, {nodes} SuperNodes online")
            path = launch(
                app_folder,
                superlink=CONNECTION,
                nodes=nodes,
                settings=settings or (),
                runs=runs,
                env=deployment.env,
            )
    if path is not None:
        console.print(f"Report: {path / 'report.html'}", soft_wrap=True)
