"""``flower-ext study``: link tables, and run the stages of a study that share one account.

The run directory of each stage is in the study's folder, beside the account. Repeat the command to
continue a study: a complete stage is kept, and an interrupted stage is resumed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_ext.cli import link
from flower_ext.cli.launching import launch
from flower_ext.cli.preparing import PreparedRun, RunOptions, RunsFolder, prepare
from flower_ext.cli.processes import Interrupted, LaunchFailed, signals_as_interrupts
from flower_ext.cli.reporting import ledger
from flower_ext.cli.screen import console, say, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.settings import INCIDENTAL, nearest
from flower_ext.runs.study import ACCOUNT, Stage, Study

_LINK_PATHS = ("table", "key", "output", "numbers")
_LINK_OPTIONS = tuple(name.replace("_", "-") for name in inspect.signature(link.users).parameters)


def study(
    file: Annotated[Path, typer.Argument(help="File of the study.")],
    superlink: Annotated[
        str | None,
        typer.Argument(help="Connection of Flower's configuration; by default, one process."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the study; by default its name in --runs.")
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a whole study: link tables, then each stage, under one budget; repeat it to continue.

    Example: flower-ext study study.toml
    """
    plan = Study.read(file)
    _check_links(plan)
    place = (folder or runs / file.stem).absolute()
    for entry in plan.link:
        _link(plan, entry)
    for number, stage in enumerate(plan.stage, 1):
        console.rule(f"Stage {number} of {len(plan.stage)}: {stage.name}")
        try:
            with signals_as_interrupts():
                _run(_prepared(plan, stage, place, superlink), place / stage.name)
        except Interrupted as error:
            text = f"stage {stage.name} was interrupted: repeat the command to continue the study"
            raise Interrupted(text, error.exit_status - 128) from None
        except InvalidValue as error:
            raise InvalidValue(f"stage {stage.name}: {error}") from error
        except LaunchFailed as error:
            raise LaunchFailed(
                f"stage {stage.name}: {error}. Remove the cause and repeat the command, which "
                "keeps complete stages"
            ) from error
    console.rule(plan.title or file.stem)
    pages = titled_table("Stages", ("stage", "page"))
    for stage in plan.stage:
        for page in sorted((place / stage.name).glob("*.html")):
            pages.add_row(stage.name, str(page))
    console.print(pages)
    if (account := place / ACCOUNT).exists():
        ledger(account)


def _check_links(plan: Study) -> None:
    """Refuse a table ``[[link]]`` that ``flower-ext link users`` could not read."""
    for entry in plan.link:
        if unknown := [name for name in entry if name not in _LINK_OPTIONS]:
            raise InvalidValue(
                f"study {plan.path}: [[link]] has no {unknown[0]!r}; "
                f"{nearest(unknown[0], _LINK_OPTIONS)}"
            )
        if not {"table", "key", "output"} <= set(entry):
            raise InvalidValue(
                f"study {plan.path}: expected table, key and output in each [[link]]"
            )


def _link(plan: Study, entry: Mapping[str, Any]) -> None:
    """Write a silo's linked table.

    Keep a linked table that exists and is newer than the study's file, the silo's table and the
    key.
    """
    options = {name.replace("-", "_"): value for name, value in entry.items()}
    options |= {name: plan.placed(options[name]) for name in _LINK_PATHS if name in options}
    output, sources = options["output"], [plan.path, options["table"], options["key"]]
    console.rule(f"Link {entry['table']}")
    newest = max((path.stat().st_mtime for path in sources if path.exists()), default=0.0)
    if output.exists() and output.stat().st_mtime > newest:
        say(f"{output}: kept")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    link.users(**options)


def _prepared(plan: Study, stage: Stage, place: Path, superlink: str | None) -> PreparedRun:
    """Return the run of a stage, ready to start."""
    settings = plan.settings_of(stage, place)
    options = RunOptions(
        app=plan.placed(plan.app),
        superlink=superlink,
        settings=[f"{name}={_text(value)}" for name, value in settings.items()],
        in_process=superlink is None,
    )
    return prepare(options)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run(run: PreparedRun, path: Path) -> None:
    """Run a stage; continue it if it was interrupted, and keep it if it is complete."""
    if (path / "run.json").exists():
        directory = RunDirectory.open(path)
        before = directory.config
        changed = [
            f"{name} = {before.get(name)!r}, now {value!r}"
            for name, value in run.config.items()
            if name not in INCIDENTAL and before.get(name) != value
        ]
        if changed and directory.has_used_data():
            raise InvalidValue(
                f"the stage began in {path} with different settings ({'; '.join(changed)}): undo "
                "these changes, or give the stage another name"
            )
        if changed:
            path.rename(path.with_name(f"{path.name}-{directory.id[:8]}"))
        elif directory.status == "completed":
            _check_released(directory)
            say(f"{path}: complete, kept")
            return
        else:
            run = prepare(replace(run.options, settings=(), resume=path))
    _launch(run, path)


def _launch(run: PreparedRun, path: Path) -> None:
    """Run a stage to its end; fail if the run leaves nothing for later stages."""
    launch(run)
    if not (path / "run.json").exists():
        raise LaunchFailed(
            f"{path} is not on this machine: repeat the command where the ServerApp runs"
        )
    directory = RunDirectory.open(path)
    if directory.status != "completed":
        raise LaunchFailed(
            f"the stage's run ended as {directory.status}; {path / 'report.html'} says why"
        )
    _check_released(directory)


def _check_released(directory: RunDirectory) -> None:
    """Refuse a stage whose rounds were all discarded: it released nothing for later stages."""
    rounds = directory.metrics()
    if rounds and all(row.get("discarded") for row in rounds):
        raise LaunchFailed(
            "every round was discarded, so the stage released nothing, although its ε is spent; "
            f"{directory.path / 'report.html'} says why. To run it again, give it another name, "
            "also in `uses`"
        )
