"""The command line: ``flower-ext run | deploy | calibrate | plan | search | audit | export`` …"""

from __future__ import annotations

import io
import signal
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from flower_ext.cli.audit import audit
from flower_ext.cli.calibrate import calibrate
from flower_ext.cli.deployment import CONNECTION, Deployment
from flower_ext.cli.export import export
from flower_ext.cli.launch import checked_settings, launch
from flower_ext.cli.ledger import ledger
from flower_ext.cli.schedule import plan, search
from flower_ext.cli.screen import Command, Settings, console
from flower_ext.cli.settings import settings as list_settings
from flower_ext.runs.comparison import write_comparison
from flower_ext.runs.directory import RUNS_VARIABLE, RunDirectory
from flower_ext.runs.report import write_report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AppFolder = Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")]
Runs = Annotated[Path, typer.Option(envvar=RUNS_VARIABLE, help="Where the run directory is made.")]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"flower-ext {metadata.version('flower-ext')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Private and personalised federated learning for Flower."""


@app.command(cls=Command)
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

    Example: flower-ext run apps/dp2_fedsam --clients 200 --set method=centaur --set rounds=20
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


@app.command(cls=Command)
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

    Example: flower-ext deploy apps/dp2_fedsam --nodes 4 --set rounds=3
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


@app.command(cls=Command)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[Path, typer.Option(help="Where a comparison of several runs goes.")] = Path(
        "comparison"
    ),
) -> None:
    """(Re)write the report of a run; compare several, those that differ in the seed as one.

    Example: flower-ext report runs/20260101-120000-dp2-fedsam-digits
    """
    opened = [RunDirectory.open(path) for path in runs]
    if len(opened) == 1:
        path = write_report(opened[0])
    else:
        output.mkdir(parents=True, exist_ok=True)
        path = write_comparison(opened, output, title="Comparison of runs")
    console.print(str(path.absolute()), soft_wrap=True)


for command in (calibrate, plan, search, audit, ledger, export):
    app.command(cls=Command)(command)
app.command(name="settings", cls=Command)(list_settings)


def main() -> None:
    """Entry point of ``flower-ext``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ε shows a question mark
    app()


if __name__ == "__main__":
    main()
