"""``flower-ext export``: write the shared model of a run, or one client's model, to a file.

A client's model is the model that its method evaluates. The method builds it from the shared
model, from the client's memory and, if the method trains before it evaluates, from the client's
records. The command writes a guarantee for exactly this file next to it. A personal part of a model
carries no noise, because clients never send it, so no ε covers the records that trained it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from flwr.app import ConfigRecord, Context, RecordDict
from safetensors.torch import load_file, save

from flower_ext.cli.screen import say
from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientMemory, InProcessGrid
from flower_ext.federation.client.app import CohortApp
from flower_ext.federation.client.client_side import ClientSide
from flower_ext.federation.engines.run_app import load_app
from flower_ext.federation.messages import records
from flower_ext.files import write_whole
from flower_ext.privacy import AdversaryView
from flower_ext.runs.app_settings import checked_settings
from flower_ext.runs.directory import RunDirectory
from flower_ext.training import Params, clone


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    client: Annotated[
        int | None,
        typer.Option(
            help="Client whose model is exported; by default the shared model after the last round."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to create, NAME.safetensors.")] = None,
    app: Annotated[
        Path | None,
        typer.Option(help="Folder of the Flower app; by default the one that the run recorded."),
    ] = None,
) -> None:
    """Write a client's model, or the shared model, to a file, with its privacy guarantee.

    The guarantee is a second file, NAME.guarantee.json. It says who may have the model, and which ε
    protects whose records.

    Example: flower-ext export runs/20260101-120000-dp2-fedsam-digits --client 7
    """
    directory = RunDirectory.open(run)
    whose = "model" if client is None else f"client-{client}"
    file = output or Path(f"{run.resolve().name}-{whose}.safetensors")
    guarantee_file = file.with_suffix(".guarantee.json")
    _check_files(directory, file, guarantee_file)
    shared = params = load_file(directory.path / "model.safetensors")
    has_memory = False
    if client is not None:
        params, has_memory = _client_model(directory, shared, client, app)
    personal = [
        name
        for name, value in params.items()
        if name not in shared or not torch.equal(value, shared[name])
    ]
    # A model may reveal whether its client ever took part, even if it equals the shared one.
    is_secret = bool(personal) or has_memory
    # A guarantee for uploads covers the models, too, because models are computed from uploads.
    guarantees = directory.guarantees()
    against_models = [g for g in guarantees if g.view is AdversaryView.RELEASED_MODELS]
    covering = against_models or guarantees
    statements = [each.statement() for each in covering] or [
        "The run gave no guarantee: no ε covers anybody's records in this file."
    ]
    guarantee: dict[str, Any] = {
        "file": file.name,
        "run": directory.id,
        "client": client,
        "for": f"client {client} alone" if is_secret else "everyone who may have the run's models",
        "parameters": {"shared": [n for n in params if n not in personal], "personal": personal},
        "statements": [*_about_client(client, personal, is_secret), *statements],
        "guarantees": [each.to_dict() for each in covering],
    }
    tags = {"run": directory.id, "frozen": str(directory.use().get("frozen", ""))}
    # Write the guarantee first, so that no model is ever on disk without it.
    write_whole(guarantee_file, json.dumps(guarantee, indent=2, ensure_ascii=False).encode())
    write_whole(file, save(params, tags), private=client is not None)
    for line in (f"Model: {file}", f"Guarantee: {guarantee_file}", *guarantee["statements"]):
        say(line)


def _check_files(run: RunDirectory, *outputs: Path) -> None:
    if outputs[0].suffix != ".safetensors":
        raise InvalidValue(f"output={outputs[0]}: expected a name that ends with .safetensors")
    for file in outputs:
        if file.exists():
            raise InvalidValue(f"output={file}: this file exists; name a new one")
    has_ended = run.status in ("completed", "budget-exhausted")
    if not has_ended or not (run.path / "model.safetensors").is_file():
        fault = "it lacks model.safetensors" if has_ended else f"its status is {run.status!r}"
        raise InvalidValue(
            f"run={run.path}: expected a run that has ended and saved its model, but {fault}; "
            f"continue it with flower-ext run APP --resume {run.path}"
        )


def _client_model(
    run: RunDirectory, shared: Params, client: int, app: Path | None
) -> tuple[Params, bool]:
    """Return a client's model, built from the shared one, and True if clients keep a memory."""
    use = run.use()
    if not use:
        raise InvalidValue(
            f"run={run.path}: expected a run directory with use.json, which says how a client "
            f"builds its model from the shared one; flower-ext run APP --resume {run.path} writes "
            "it without another round"
        )
    if not 0 <= client < use["clients"]:
        raise InvalidValue(f"client={client}: expected a client's number, 0 … {use['clients'] - 1}")
    side, grid = _client_side(run, use, app)
    context = [*grid.contexts.values()][client]
    fingerprint = side.task_of(context).fingerprint
    if use["frozen"] not in ("", fingerprint):
        raise InvalidValue(
            f"the app's frozen parameters have the fingerprint {fingerprint!r}, but the "
            f"run used those with {use['frozen']!r}: install the base model that the run used"
        )
    # The run directory, and the clients' memory in it, may have moved.
    inside, configured = run.path / "state", str(run.config.get("state-folder", ""))
    is_inside = inside.is_dir() or not configured
    context.node_config["state-folder"] = str(inside) if is_inside else configured
    if side.method.keeps_memory:
        _check_memory(side, context, use, run.id)
    # Ask the client side as the server asks for an evaluation, so that it builds the same model.
    request = RecordDict({name: ConfigRecord(values) for name, values in use["records"].items()})
    request[records.MODEL] = records.to_record(shared)
    kind = f"evaluate.{side.method.name}"
    model = side.used(grid.create_message(request, kind, context.node_id, "1"), context)
    return clone({name: value.cpu() for name, value in model.items()}), side.method.keeps_memory


def _client_side(
    run: RunDirectory, use: Mapping[str, Any], app: Path | None
) -> tuple[ClientSide, InProcessGrid]:
    """Return the app's `ClientSide` for the run's method, and a grid of the run's clients."""
    folder = app or run.metadata.get("app")
    if folder is None:
        raise InvalidValue("app=None: the run did not record its app; name its folder by --app")
    checked_settings(Path(folder), ())
    _, client_app = load_app(Path(folder).absolute())
    sides = client_app.sides if isinstance(client_app, CohortApp) else {}
    if use["method"] not in sides:
        raise InvalidValue(
            f"app={folder}: its ClientApp knows no method {use['method']!r}, but this method "
            "trained the run: expected the app that made the run, with a client_app from "
            "flower_ext.federation"
        )
    return sides[use["method"]], InProcessGrid(client_app, use["clients"], run.config)


def _check_memory(side: ClientSide, context: Context, use: Mapping[str, Any], run_id: str) -> None:
    """Refuse a state folder that lacks the latest memory of the client whose model is exported."""
    client, folder = context.node_config["partition-id"], context.node_config["state-folder"]
    last = use["records"][records.ROUND]["number"]
    newest = ClientMemory(context, side.method.name, run_id).newest(last + 1)
    needed = use["remembered"].get(str(client), 0)
    if newest < needed or not Path(str(folder)).is_dir():
        raise InvalidValue(
            f"state-folder={folder}: expected the memory that client {client} wrote in round "
            f"{needed}, but it is not in this folder. A simulation keeps memory only if it began "
            "with the setting state-folder; in a deployment, memory stays on the client's node"
        )


def _about_client(client: int | None, personal: Sequence[str], is_secret: bool) -> list[str]:
    """Return sentences that say what the file reveals about its client and about other clients."""
    if is_secret:
        return [
            f"This file holds parameters of client {client} that carry no noise: no ε covers the "
            f"records that trained them, and the file is for client {client} alone. These "
            f"parameters are: {', '.join(personal) or 'none'}.",
            "About all other clients this file reveals what the run's released models reveal, and "
            f"whether and when client {client} took part. The guarantees below cover these other "
            f"clients, not client {client}.",
        ]
    unchanged = "" if client is None else f", which client {client} uses as it is"
    return [
        f"This file holds the model that clients share{unchanged}: the last of the run's released "
        "models. The guarantees below cover it."
    ]
