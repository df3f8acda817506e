"""``flower-ext study``: link tables, and run the stages of a study that share one account.

The run directory of each stage is in the study's folder, beside the account. Repeat the command to
continue a study: a complete stage is kept, and an interrupted stage is resumed.

A study is a TOML file::

    title = "Three hospitals"
    app = "apps/consortium"

    [settings]                       # of all stages, as for `flower-ext run --set`
    num-silos = 3
    population-epsilon = 1.5         # the budget that all stages spend together; 0: no account
    population-delta = 1e-7

    [[link]]                         # options of `flower-ext link users`, once for each silo
    table = "north.csv"
    by = ["surname", "given"]
    key = "study.key"
    buckets = 100000
    output = "linked/silo-0.csv"

    [[stage]]
    name = "statistics"
    settings = { method = "statistics", epsilon = 0.3 }

    [[stage]]
    name = "training"
    uses = ["statistics/standardise.toml"]      # files of settings that earlier stages wrote
    settings = { epsilon = 1.0 }
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import click
import typer
from typer.main import get_command

from flower_ext.cli.launching import launch
from flower_ext.cli.preparing import PreparedRun, RunOptions, RunsFolder, prepare
from flower_ext.cli.processes import Interrupted, LaunchFailed
from flower_ext.cli.reporting import ledger
from flower_ext.cli.screen import console, say, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.files import from_table, read_toml
from flower_ext.runs.app_settings import SettingsFile, declared_settings
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.settings import OF_NODES, changed_settings
from flower_ext_consortium.commands import link

_ACCOUNT = "account.jsonl"
"""File in a study's folder with the privacy that all stages have spent."""
_EPSILON, _DELTA, _LEDGER = "population-epsilon", "population-delta", "budget-ledger"
"""Settings of an app that name an account and its budget."""
_NO_ACCOUNT = (
    "The stages share no account: each has an ε of its own, and nothing limits what they spend "
    f"together on the same people. To limit it, set {_EPSILON} and {_DELTA} in [settings]."
)
_LINK_PATHS = {"table", "key", "output", "numbers"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of a study: its name, its settings, and the files of earlier stages that it uses."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """The content of a study's file; its paths, except in ``uses``, are relative to its folder."""

    path: Path
    app: str
    stage: Sequence[Stage]
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    link: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a study; refuse a file that lacks the form shown at the top of this module."""
        content, where = read_toml(path), f"study {path}"
        stages = [
            from_table(Stage, each, f"{where}: [[stage]]") for each in content.pop("stage", [])
        ]
        study = from_table(cls, {**content, "path": path, "stage": stages}, where)
        if not stages or len({stage.name for stage in stages}) < len(stages):
            raise InvalidValue(f"{where}: expected tables [[stage]], each with a different name")
        return study

    def placed(self, path: str) -> Path:
        """Return a path in the study's file as an absolute path."""
        return (self.path.parent / Path(path).expanduser()).absolute()

    def account(self, folder: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the account that all stages share; empty if they share no account.

        The budget may stand in [settings], in any stage, or in the app's ``defaults``. It holds for
        all stages, except those that name an account of their own. The function refuses a study
        with two budgets. It also refuses a study that names no budget, not even 0, if the app could
        keep one.
        """
        sharing = [stage for stage in self.stage if not stage.settings.get(_LEDGER)]
        epsilon, delta = (self._agreed(name, sharing) for name in (_EPSILON, _DELTA))
        if sharing and epsilon is None and defaults.get(_EPSILON) == 0:
            raise InvalidValue(
                f"study {self.path} has no {_EPSILON}, so nothing would limit what its stages "
                f"spend together: expected {_EPSILON} and {_DELTA} in [settings]. With {_EPSILON} "
                "= 0, the stages share no account"
            )
        epsilon = defaults.get(_EPSILON) if epsilon is None else epsilon
        delta = defaults.get(_DELTA) if delta is None else delta
        if not (sharing and epsilon):
            return {}
        if not delta:
            raise InvalidValue(f"study {self.path}: expected {_DELTA} > 0 beside {_EPSILON}")
        ledger = self.settings.get(_LEDGER) or defaults.get(_LEDGER) or str(folder / _ACCOUNT)
        return {_LEDGER: ledger, _EPSILON: epsilon, _DELTA: delta}

    def _agreed(self, name: str, stages: Sequence[Stage]) -> Any:
        """Return the value of a setting on which all places in the file agree; None if unset."""
        places = {"[settings]": self.settings}
        places |= {f"stage {stage.name}": stage.settings for stage in stages}
        values = {place: table[name] for place, table in places.items() if name in table}
        agreed = next(iter(values.values()), None)
        if any(value != agreed for value in values.values()):
            named = ", ".join(f"{value!r} in {place}" for place, value in values.items())
            raise InvalidValue(
                f"study {self.path}: {name} is {named}: expected one value, because the stages "
                f"share one account. A stage that needs its own account names it by {_LEDGER}"
            )
        return agreed

    def settings_of(self, stage: Stage, folder: Path, account: Mapping[str, Any]) -> dict[str, Any]:
        """Return a stage's settings; ``folder`` has the runs of earlier stages.

        ``account`` are the settings that `account` returned.
        """
        settings = {"run-directory": str(folder / stage.name), **self.settings}
        for name in OF_NODES:
            if settings.get(name):
                settings[name] = str(self.placed(settings[name]))
        for name in stage.uses:
            if not (path := folder / name).exists():
                raise InvalidValue(
                    f"`uses` names {path}, but no earlier stage has written this file: "
                    "expected STAGE/FILE with the name of an earlier stage"
                )
            settings |= SettingsFile.read(path).settings(settings)
        has_own_account = bool(stage.settings.get(_LEDGER))
        return {**settings, **stage.settings, **({} if has_own_account else account)}


def study(
    file: Annotated[Path, typer.Argument(help="File of the study.")],
    superlink: Annotated[
        str | None,
        typer.Argument(help="Connection of Flower's configuration; by default, one process."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the study; by default FILE's name in --runs.")
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a whole study: link tables, then each stage, under one budget; repeat it to continue.

    The file sets the budget, population-epsilon, for all stages together. With 0, there is none.

    Example: flower-ext study study.toml
    """
    plan = Study.read(file)
    links = [_link_command(plan, entry) for entry in plan.link]
    place = (folder or runs / file.stem).absolute()
    defaults, _ = declared_settings(plan.placed(plan.app))
    account = plan.account(place, defaults)
    if not account:
        say(_NO_ACCOUNT)
    for entry, command in zip(plan.link, links, strict=True):
        console.rule(f"Link {entry['table']}")
        _link(plan, command)
    for number, stage in enumerate(plan.stage, 1):
        console.rule(f"Stage {number} of {len(plan.stage)}: {stage.name}")
        try:
            options = RunOptions(
                app=plan.placed(plan.app),
                superlink=superlink,
                settings=[
                    f"{name}={value if isinstance(value, str) else json.dumps(value)}"
                    for name, value in plan.settings_of(stage, place, account).items()
                ],
                in_process=superlink is None,
            )
            _run(prepare(options), place / stage.name)
        except Interrupted as error:
            text = f"stage {stage.name} was interrupted: repeat the command to continue the study"
            raise Interrupted(text, error.exit_status - 128) from None
        except InvalidValue as error:
            raise InvalidValue(f"stage {stage.name}: {error}") from error
        except LaunchFailed as error:
            raise LaunchFailed(
                f"stage {stage.name}: {error}. If you repeat the command, it keeps complete stages"
            ) from error
    console.rule(plan.title or file.stem)
    pages = titled_table("Stages", ("stage", "page"))
    for stage in plan.stage:
        for page in sorted((place / stage.name).glob("*.html")):
            pages.add_row(stage.name, str(page))
    console.print(pages)
    if not account:
        say(_NO_ACCOUNT)
    elif (path := Path(account[_LEDGER])).exists():
        ledger(path)


def _link_command(plan: Study, entry: Mapping[str, Any]) -> click.Context:
    """Return ``flower-ext link users`` with the options of a table ``[[link]]``, all checked."""
    where = f"study {plan.path}: [[link]]"
    if not {"table", "key", "output"} <= set(entry):
        raise InvalidValue(f"{where}: expected table, key and output")
    options = {name: each if isinstance(each, list) else [each] for name, each in entry.items()}
    for name in _LINK_PATHS & options.keys():
        options[name] = [str(plan.placed(str(path))) for path in options[name]]
    tables, words = options.pop("table"), list[str]()
    for name, value in ((name, value) for name, values in options.items() for value in values):
        if value is not False:  # a switch has no value on a command line
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    group = get_command(link.app)
    assert isinstance(group, click.Group)
    try:
        return group.commands["users"].make_context("link users", [*words, "--", *tables])
    except click.UsageError as error:
        raise InvalidValue(f"{where}: {error.format_message()}") from None


def _link(plan: Study, command: click.Context) -> None:
    """Write a silo's linked table, unless it is newer than all files that determine it."""
    output = Path(command.params["output"])
    sources = [Path(path) for name in ("table", "key", "numbers") if (path := command.params[name])]
    newest = max(path.stat().st_mtime for path in (plan.path, *sources) if path.exists())
    # At equal times, a source may have changed after the output was written.
    if output.exists() and output.stat().st_mtime > newest:
        say(f"{output}: kept")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    assert command.command.callback is not None
    command.command.callback(**command.params)


def _run(run: PreparedRun, path: Path) -> None:
    """Run a stage; continue it if it was interrupted, and keep it if it is complete."""
    if (path / "run.json").exists():
        directory = RunDirectory.open(path)
        changed = [
            f"{name} = {before!r}, now {value!r}"
            for name, (before, value) in changed_settings(directory.config, run.config).items()
        ]
        if changed and directory.has_used_data():
            raise InvalidValue(
                f"the stage began in {path} with different settings ({'; '.join(changed)}): undo "
                "these changes, or give the stage a different name"
            )
        if changed:
            path.rename(path.with_name(f"{path.name}-{directory.id[:8]}"))
        elif directory.status == "completed":
            _check_released(directory)
            say(f"{path}: complete, kept")
            return
        else:
            run = prepare(replace(run.options, settings=(), resume=path))
    launch(run)
    if not (path / "run.json").exists():
        raise LaunchFailed(
            f"{path} is not on this machine: repeat the command where the ServerApp runs"
        )
    directory = RunDirectory.open(path)
    if directory.status != "completed":
        raise LaunchFailed(
            f"the stage's run ended as {directory.status}; {path / 'report.html'} says why: remove "
            "the cause and repeat the command"
        )
    _check_released(directory)


def _check_released(directory: RunDirectory) -> None:
    """Refuse a stage whose rounds were all discarded: it released nothing for later stages."""
    rounds = directory.metrics()
    if rounds and all(row.get("discarded") for row in rounds):
        raise LaunchFailed(
            "every round was discarded, so the stage released nothing, although its ε is spent; "
            f"{directory.path / 'report.html'} says why. To run the stage again, "
            "give it a different name, also in `uses`"
        )
