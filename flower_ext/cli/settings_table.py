"""``flower-ext settings``: list the settings of an app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.app_settings import declared_settings
from flower_ext.runs.presets import SettingsFile, presets
from flower_ext.runs.settings import Declaration

SECTION = "[tool.flwr.app.config]"


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
    show_presets: Annotated[
        bool, typer.Option("--presets", help="List the app's presets in place of its settings.")
    ] = False,
) -> None:
    """List the settings of an app: names for --set, defaults, choices and meanings.

    Example: flower-ext settings apps/dp2-fedsam
    """
    for app in apps:
        if show_presets:
            console.print(presets_table(app))
            continue
        title = f"Settings of {app.resolve().name}"
        table = titled_table(title, ("setting", "default", "choices", "meaning"))
        for name, row in rows_of(app).items():
            table.add_row(name, *map(escape, row))
        console.print(table)


def presets_table(app: Path) -> Table:
    """Return a table of an app's presets: names for ``--preset``, and what each stands for."""
    table = titled_table(f"Presets of {app.resolve().name}", ("preset", "setting"))
    for name, path in presets(app).items():
        table.add_row(name, escape(SettingsFile.read(path).title))
    return table


def rows_of(app: Path) -> dict[str, tuple[str, str, str]]:
    """Return default, choices and meaning of an app's settings, in ``pyproject.toml``'s order.

    Raises
    ------
    InvalidValue
        The folder is not a Flower app, or the app has no settings.
    """
    defaults, known = declared_settings(app)
    if not defaults:
        raise InvalidValue(f"{app} has no settings: add {SECTION} to its pyproject.toml")
    return {
        name: (_default(defaults[name]), " | ".join(_choices(declaration)), declaration.meaning)
        for name, declaration in known.items()
    }


def _default(value: object) -> str:
    return json.dumps(value).strip('"') or '""'


def _choices(declaration: Declaration) -> tuple[str, ...]:
    return ("true", "false") if declaration.kind is bool else declaration.choices
