"""``flower-ext settings``: list the settings of an app."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.app_settings import SettingsFile, declared_settings, presets


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
            table = titled_table(f"Presets of {app.resolve().name}", ("preset", "setting"))
            for name, path in presets(app).items():
                table.add_row(name, escape(SettingsFile.read(path).title))
        else:
            columns = ("setting", "default", "choices", "meaning")
            table = titled_table(f"Settings of {app.resolve().name}", columns)
            for name, row in rows_of(app).items():
                table.add_row(name, *map(escape, row))
        console.print(table)


def rows_of(app: Path) -> dict[str, tuple[str, str, str]]:
    """Return default, choices and meaning of an app's settings, in ``pyproject.toml``'s order."""
    defaults, known = declared_settings(app)
    if not defaults:
        raise InvalidValue(
            f"{app} has no settings: add [tool.flwr.app.config] to its pyproject.toml"
        )
    rows = {}
    for name, declared in known.items():
        choices = ("true", "false") if declared.kind is bool else declared.choices
        default = json.dumps(defaults[name]).strip('"') or '""'
        rows[name] = (default, " | ".join(choices), declared.meaning)
    return rows
