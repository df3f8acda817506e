"""``flower-ext run``: an app on Ray's simulation, on a SuperLink, or in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.launch import launch
from flower_ext.cli.screen import Settings, console
from flower_ext.runs.directory import RUNS_VARIABLE, RunDirectory

AppFolder = Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")]
Runs = Annotated[Path, typer.Option(envvar=RUNS_VARIABLE, help="Where the run directory is made.")]


def run(
    app_folder: AppFolder,
    superlink: Annotated[
        str | None,
        typer.Argument(help="Connection in Flower's config; by default the local simulation."),
    ] = None,
    settings: Settings = None,
    runs: Runs = Path("runs"),
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="All clients in one process, in batches, without Ray."),
    ] = False,
    clients: Annotated[
        int | None, typer.Option(min=1, help="So many clients, in one process.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the clients of such a run.")
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run directory to go on with; --set rounds=N goes beyond its end."),
    ] = None,
) -> None:
    """Run a Flower app, show its log, and exit with 1 if the run failed.

    Example: flower-ext run apps/dp2-fedsam --clients 200 --set method=centaur --set rounds=20
    """
    path = launch(
        app_folder,
        superlink=superlink,
        settings=settings or (),
        runs=runs,
        in_process=in_process,
        clients=clients,
        workers=workers,
        resume=resume,
    )
    if path is not None and (path / "run.json").is_file():
        RunDirectory.open(path).note(app=str(app_folder.absolute()))  # for export
    if path is not None and superlink is None:
        console.print(f"Run directory: {path}", soft_wrap=True)
