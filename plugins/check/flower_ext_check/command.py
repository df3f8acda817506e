"""``flower-ext check``: a second opinion on the privacy of any Flower app."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from flower_ext.cli.processes import signals_as_interrupts
from flower_ext.cli.screen import Page, console, say
from flower_ext.errors import FlowerExtError
from flower_ext.runs.app_settings import checked_settings
from flower_ext.runs.page import to_markdown
from flower_ext.runs.settings import clients_setting, num_nodes
from flower_ext_check.app_folder import unpack
from flower_ext_check.forks import in_fork
from flower_ext_check.request import CheckRequest
from flower_ext_check.stand_in import parse_column

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "FLWR_TELEMETRY_ENABLED": "0",
}


class AppFailed(FlowerExtError):
    """The app could not be checked."""


def check(
    app: Annotated[Path, typer.Argument(metavar="APP", help="Folder or FAB of a Flower app.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 3,
    clients: Annotated[
        int | None, typer.Option(min=2, help="Clients to run; by default as the app says, or 10.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a setting.")
    ] = None,
    data: Annotated[
        Literal["own", "random"],
        typer.Option(help="random: replace flwr_datasets by random rows."),
    ] = "own",
    column: Annotated[
        list[str] | None,
        typer.Option(help="A column of random rows, such as img=image:32x32x3 or label=int:10."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for CI.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="Keep what the app prints in this file; it may hold data.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a run ends.")] = 300,
) -> None:
    """Run a Flower app for a few rounds, watch its messages, and say which privacy is provable.

    The app's code runs with your rights. Exit status 3: the app claims an ε that is not provable.

    Example: flower-ext check my-app --data random
    """
    columns = dict(parse_column(text) for text in column or [])
    with signals_as_interrupts(), TemporaryDirectory(prefix="flower-ext-check-") as scratch:
        folder = unpack(app, Path(scratch).resolve())
        defaults, changes = checked_settings(folder.path, settings or [])
        config = {**defaults, **changes}
        if (setting := clients_setting(config)) is not None and clients is not None:
            config[setting] = clients
        if "clients-per-node" in config:
            config["clients-per-node"] = 1
        request = CheckRequest(
            app=folder,
            log=Path(scratch, "log"),
            config=config,
            clients=(num_nodes(config) if setting else None) or clients or 10,
            rounds=rounds,
            seconds=timeout,
            random_data=data == "random",
            columns=columns,
        )
        result = in_fork(partial(_verdict_or_reason, request))
        if result is None:
            raise AppFailed(
                "the check's process, which runs the app, ended early: the app called exit, the "
                "process crashed, or the system killed it for lack of memory; remove such a call, "
                "or check fewer clients"
            )
        if log is not None:
            shutil.copyfile(request.log, log)
            log.chmod(0o600)
    if isinstance(result, str):
        raise AppFailed(result + ("" if log else "; to keep what the app printed, add --log FILE"))
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        console.print(Page(to_markdown("check", "flower_ext_check", **result)))
        if result["diff"]:
            say("\nA change that makes ε provable (read it: it replaces strategy and mods)")
            say(result["diff"])
    raise typer.Exit(3 if result["unproven"] else 0)


def _verdict_or_reason(request: CheckRequest) -> dict[str, Any] | str:
    """Check an app; return the verdict as JSON, or the reason why the app could not be checked.

    Call this function in a fork. It returns no `Verdict`, because this process would import PyTorch
    only to receive it.
    """
    os.environ.update(_ENVIRONMENT)
    # This import includes PyTorch, which reads the environment.
    from flower_ext_check.checked import NotChecked, check_app

    try:
        return check_app(request).to_dict()
    except NotChecked as error:
        return str(error)
