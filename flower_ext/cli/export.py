"""``flower-ext export``: write the shared model of a run, or one client's model, to a file.

A client's model is the model that its method evaluates. The method builds it from the shared
model, from the client's memory and, if the method trains before it evaluates, from the client's
records. The command writes a guarantee for exactly this file next to it. No ε covers the records
that trained a personal part, because that part never left the client and carries no noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from flwr.app import ConfigRecord, Context, RecordDict
from safetensors.torch import load_file, save

from flower_ext.cli.project import checked_settings
from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientMemory, InProcessGrid, records
from flower_ext.federation.client.app import MethodsApp
from flower_ext.federation.client.side import ClientSide
from flower_ext.federation.engines.run_app import load_app
from flower_ext.federation.state.folder import read_key
from flower_ext.privacy import AdversaryView
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.files import write_whole
from flower_ext.training import Params, Task, clone

_SUFFIXES = (".safetensors", ".pt")
_FINISHED = ("completed", "budget-exhausted")


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model to write to a file, with the facts that its guarantee rests on.

    ``personal`` names the parameters that differ from the shared model. ``trained`` is True if a
    record of the client influenced them. ``drawn`` is True if the client ever took part, and None
    if the client's method keeps no memory to tell.
    """

    params: Params
    client: int | None = None
    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    fingerprint: str = ""
    trained: bool = False
    drawn: bool | None = None


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    client: Annotated[
        int | None,
        typer.Option(
            help="Client whose model is exported; by default the shared model after the last round."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to create: .safetensors, or .pt for torch.load.")
    ] = None,
    app: Annotated[
        Path | None,
        typer.Option(help="Folder of the Flower app; by default the one that the run recorded."),
    ] = None,
    state_folder: Annotated[
        Path | None,
        typer.Option(help="Folder with the client's memory; by default the run's state folder."),
    ] = None,
    state_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that decrypts the client's memory.")
    ] = None,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Include frozen parts and all copies of tied parameters."),
    ] = False,
) -> None:
    """Write a client's model, or the shared model, to a file, with its privacy guarantee.

    The guarantee is a second file, NAME.guarantee.json. It says who may have the model, and whose
    records are protected by which ε.

    Example: flower-ext export runs/20260101-120000-dp2-fedsam-digits --client 7
    """
    found = RunDirectory.open(run)
    whose = "model" if client is None else f"client-{client}"
    file = output or Path(f"{run.resolve().name}-{whose}.safetensors")
    beside = file.with_suffix(".guarantee.json")
    _check_output(file, beside)
    _check_finished(found)
    made = _made(found, client, app, state_folder, state_key_file, whole=whole)
    promise = _promise(found, made, file.name)
    content = _as_bytes(made, found.id, file.suffix)
    # The guarantee first, so that no model is ever on disk without it.
    write_whole(beside, json.dumps(promise, indent=2, ensure_ascii=False).encode())
    write_whole(file, content, private=client is not None)
    for line in (f"Model: {file}", f"Guarantee: {beside}", *promise["statements"]):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _check_output(*files: Path) -> None:
    if files[0].suffix not in _SUFFIXES:
        raise InvalidValue(f"output={files[0]}: expected a name in {' or '.join(_SUFFIXES)}")
    for file in files:
        if file.exists():
            raise InvalidValue(f"output={file}: expected the name of a new file, this one exists")


def _check_finished(run: RunDirectory) -> None:
    status = run.facts["status"]
    if status not in _FINISHED or not (run.path / "model.safetensors").is_file():
        raise InvalidValue(
            f"run={run.path}: expected a run that has ended, its status is {status!r}; continue it "
            "by flower-ext run APP --resume"
        )


def _made(
    run: RunDirectory,
    client: int | None,
    app: Path | None,
    folder: Path | None,
    key: Path | None,
    *,
    whole: bool,
) -> _Model:
    """Return the model that the options ask for."""
    shared, use = load_file(run.path / "model.safetensors"), run.use()
    if client is None and not whole:
        return _Model(params=shared, fingerprint=str(use.get("frozen", "")))
    if not use:
        raise InvalidValue(
            f"run={run.path}: expected a run directory with use.json, which says how a client "
            "builds its model from the shared one; flower-ext run APP --resume writes it without "
            "another round"
        )
    if client is not None and not 0 <= client < use["clients"]:
        raise InvalidValue(f"client={client}: expected 0 … {use['clients'] - 1}")
    side, grid = _parts(run, use, app)
    context = [*grid.contexts.values()][client or 0]
    task = side.task_of(context)
    if use["frozen"] not in ("", task.fingerprint):
        raise InvalidValue(
            f"the frozen part of the app's model has the fingerprint {task.fingerprint!r}: "
            f"expected {use['frozen']!r}, as in the run; install the base model that the run used"
        )
    if client is None:
        made = _Model(params=shared, fingerprint=task.fingerprint)
    else:
        context.node_config.update(_state(run, folder, key))
        made = _clients_model(side, grid, context, shared, use, run.id)
    return _completed(made, task) if whole else made


def _parts(
    run: RunDirectory, use: Mapping[str, Any], app: Path | None
) -> tuple[ClientSide, InProcessGrid]:
    """Return the client side of the run's method, and a grid with the run's clients."""
    named = app or run.facts.get("app")
    if named is None:
        raise InvalidValue("app=None: the run did not record its app; name its folder by --app")
    checked_settings(Path(named), ())
    _, client_app = load_app(Path(named).absolute())
    sides = client_app.sides if isinstance(client_app, MethodsApp) else {}
    if use["method"] not in sides:
        raise InvalidValue(
            f"app={named}: its ClientApp knows no method {use['method']!r}, which trained this "
            "run; expected the app of the run, whose client_app comes from flower_ext.federation"
        )
    return sides[use["method"]], InProcessGrid(client_app, use["clients"], run.config)


def _state(run: RunDirectory, folder: Path | None, key: Path | None) -> dict[str, str]:
    """Return the node config that says where the client's memory is."""
    named = run.config.get("state-folder", "")
    inside = run.path / "state"  # the run directory, and its state with it, may have moved
    found = folder or (inside if inside.is_dir() or not named else Path(str(named)))
    if key is not None:
        try:
            read_key(key.expanduser())
        except PermissionError as error:
            raise InvalidValue(str(error)) from error
    return {"state-folder": str(found)} | ({} if key is None else {"state-key-file": str(key)})


def _clients_model(
    side: ClientSide,
    grid: InProcessGrid,
    context: Context,
    shared: Params,
    use: Mapping[str, Any],
    run_id: str,
) -> _Model:
    """Return the model that a client uses after the run's last round."""
    client, asked = int(context.node_config["partition-id"]), use["records"]
    drawn = None
    if side.method.keeps_memory:
        drawn = _remembers(side, context, use, run_id)
    content = RecordDict({name: ConfigRecord(facts) for name, facts in asked.items()})
    content[records.MODEL] = records.to_record(shared)
    kind = f"evaluate.{side.method.name}"
    model = side.used(grid.create_message(content, kind, context.node_id, "1"), context)
    own = clone({name: value.cpu() for name, value in model.items()})
    trains = any(name.startswith(records.TRAINING) for name in asked)
    return _Model(
        params=own,
        client=client,
        personal=tuple(n for n in own if n not in shared or not torch.equal(own[n], shared[n])),
        fingerprint=side.task_of(context).fingerprint,
        trained=trains or bool(drawn),
        drawn=drawn,
    )


def _remembers(side: ClientSide, context: Context, use: Mapping[str, Any], run_id: str) -> bool:
    """Return True if the client ever took part.

    Raises
    ------
    InvalidValue
        The folder lacks memory that the client wrote. Without this check the client would look as
        if it had never taken part.
    """
    client, folder = context.node_config["partition-id"], context.node_config["state-folder"]
    last = use["records"][records.ROUND]["number"]
    newest = ClientMemory(context, side.method.name, run_id).newest(last + 1)
    needed = use["remembered"].get(str(client), 0)
    if newest < needed or not Path(str(folder)).is_dir():
        raise InvalidValue(
            f"state-folder={folder}: expected the memory that client {client} wrote in round "
            f"{needed}, but it is not in this folder; name the right one by --state-folder. Memory "
            "outlives a run only if the SuperNodes, or the settings of a simulation, named a "
            "state-folder before the run began"
        )
    return newest > 0


def _completed(made: _Model, task: Task) -> _Model:
    """Return the same model with every entry of the module's ``state_dict()``."""
    found = {name: tuple(value.shape) for name, value in made.params.items()}
    if missing := sorted(task.shapes.keys() - found.keys()):
        raise InvalidValue(
            f"--whole: {missing} are not part of the shared model, because each client has its "
            "own; choose a client by --client"
        )
    if found != dict(task.shapes):
        raise InvalidValue(
            "--whole: the names or shapes of the app's parameters differ from the run's; name the "
            "app of the run by --app"
        )
    module = task.model()
    module.load_state_dict(made.params, strict=False)
    state = module.state_dict()
    own = {state[name].data_ptr() for name in made.personal}  # tied copies share their address
    return replace(
        made,
        params=clone(state),
        personal=tuple(name for name, value in state.items() if value.data_ptr() in own),
        frozen=tuple(name for name in state if name in task.blueprint.frozen),
    )


def _as_bytes(made: _Model, run_id: str, suffix: str) -> bytes:
    tensors = {name: value.cpu().contiguous() for name, value in made.params.items()}
    if suffix == ".safetensors":
        return save(tensors, {"run": run_id, "frozen": made.fingerprint})
    stream = BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


def _promise(run: RunDirectory, made: _Model, name: str) -> dict[str, Any]:
    """Return the guarantee of this file: in sentences, and as the run's guarantees."""
    every = run.guarantees()
    # A guarantee for uploads covers the models, too, because models are computed from uploads.
    holding = [g for g in every if g.view is AdversaryView.RELEASED_MODELS] or every
    rest = [g.statement() for g in holding] or [
        "The run gave no guarantee: no ε covers anybody's records in this file."
    ]
    alone = bool(made.personal) or made.drawn is False
    return {
        "file": name,
        "run": run.id,
        "client": made.client,
        "for": f"client {made.client} alone" if alone else "everyone who may have the run's models",
        "statements": [*_of_the_client(made), *rest],
        "parameters": {
            "shared": [n for n in made.params if n not in (*made.personal, *made.frozen)],
            "personal": list(made.personal),
            "frozen": list(made.frozen),
        },
        "frozen": made.fingerprint,
        "guarantees": [g.to_dict() for g in holding],
    }


def _of_the_client(made: _Model) -> list[str]:
    who, own = f"client {made.client}", ", ".join(made.personal)
    if made.personal and made.trained:
        when = ", and when the client took part" if made.drawn else ""
        return [
            f"This file holds parameters trained on {who}'s records without noise: no ε covers "
            f"them, and the file is for {who} alone. These parameters are: {own}.",
            f"About all other clients this file reveals what the run's released models reveal{when}"
            f". The guarantees below cover these other clients, not {who}.",
        ]
    if made.drawn is False:
        values = f"; {own} are the initial values" if own else ""
        return [
            f"Client {made.client} never took part, and none of its records is in this file"
            f"{values}. An ε may depend on keeping secret who took part, so this file is for {who} "
            "alone.",
            "About all other clients this file reveals what the run's released models reveal. The "
            "guarantees below cover them.",
        ]
    same = "" if made.client is None else f", which {who} uses as it is"
    return [
        f"This file holds the model that clients share{same}: the last of the run's released "
        "models. The guarantees below cover it."
    ]
