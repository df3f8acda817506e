"""``flower-ext run``: run an app in Ray's simulation, on a SuperLink, or in one process."""

from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource

from flower_ext.cli.launching import launch
from flower_ext.cli.preparing import Overrides, RunOptions, RunsFolder, prepare
from flower_ext.cli.screen import say
from flower_ext.runs.directory import RunWriter


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
        typer.Option(help="Preset to run; `flower-ext settings APP --presets` lists the presets."),
    ] = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="File of settings; --set overrides them.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Train all clients in one process, in batches, without Ray."
        ),
    ] = False,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.")] = None,
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
    path = launch(prepare(options))
    if path is not None and (path / "run.json").is_file():
        RunWriter.open(path).note(app=str(app_folder.absolute()))  # for export
    if path is not None and superlink is None:
        say(f"Run directory: {path}")
