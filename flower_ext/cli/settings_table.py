"""``flower-ext settings``: list the settings of an app with their defaults and meanings.

See `flower_ext.cli.project` for where they come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flower_ext.cli.project import SECTION, checked_settings, declared_settings
from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.files import write_whole
from flower_ext.runs.page import Markup, escaped
from flower_ext.runs.page import table as markdown_table
from flower_ext.runs.settings import Declaration

_PAGE = """# Settings

Each is a `--set name=value` of `flower-ext run`, and a name in `[tool.flwr.app.config]` of an app
of your own whose class of settings declares it (see [Let settings
choose](guides/drop-in.md#let-settings-choose)).

Written by `flower-ext settings apps/* --markdown docs/settings.md` from the defaults in each app's
`pyproject.toml` and the texts in its `settings.py`, or in `flower_ext/runs/shared_settings.py` for
the settings that apps share: change them there.

"""


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
    markdown: Annotated[
        Path | None, typer.Option(help="Write one table of all apps to this Markdown file instead.")
    ] = None,
) -> None:
    """List the settings of an app: names for --set, defaults, choices and meanings.

    Example: flower-ext settings apps/dp2-fedsam
    """
    settings_by_app = {app.resolve().name: rows_of(app) for app in apps}
    if markdown is not None:
        write_whole(markdown, as_markdown(settings_by_app).encode(), private=False)
        return
    for app, rows in settings_by_app.items():
        table = titled_table(f"Settings of {app}", ("setting", "default", "choices", "meaning"))
        for name, row in rows.items():
            table.add_row(name, *map(escape, row))
        console.print(table)


def rows_of(app: Path) -> dict[str, tuple[str, str, str]]:
    """Return default, choices and meaning of an app's settings, in ``pyproject.toml``'s order.

    Raises
    ------
    InvalidValue
        The folder is not a Flower app, or the app has no settings.
    """
    defaults, _ = checked_settings(app, ())
    if not defaults:
        raise InvalidValue(f"{app} has no settings: add {SECTION} to its pyproject.toml")
    return {
        name: (_default(defaults[name]), " | ".join(_choices(declaration)), declaration.meaning)
        for name, declaration in declared_settings(app).items()
    }


def _default(value: object) -> str:
    return json.dumps(value).strip('"') or '""'


def _choices(declaration: Declaration) -> tuple[str, ...]:
    return ("true", "false") if declaration.kind is bool else declaration.choices


def as_markdown(apps: dict[str, dict[str, tuple[str, str, str]]]) -> str:
    """Return a Markdown page with one table: a row for each setting, a column for each app."""
    names = sorted(apps)
    lines = []
    for setting in dict.fromkeys(setting for app in names for setting in apps[app]):
        rows = {app: apps[app][setting] for app in names if setting in apps[app]}
        defaults = [Markup(f"`{rows[app][0]}`") if app in rows else "–" for app in names]
        choices = _by_app({app: choices for app, (_, choices, _) in rows.items()})
        meaning = _by_app({app: meaning for app, (*_, meaning) in rows.items()})
        lines.append([Markup(f"`{setting}`"), *defaults, choices, meaning])
    return _PAGE + markdown_table(["setting", *names, "choices", "meaning"], lines) + "\n"


def _by_app(texts: dict[str, str]) -> Markup:
    """Return a setting's text: once if all apps agree, otherwise with the names of the apps."""
    apps = {text: [app for app in texts if texts[app] == text] for text in texts.values()}
    if len(apps) == 1:
        return Markup(escaped(*apps))
    lines = (f"*{', '.join(names)}*: {escaped(text)}" for text, names in apps.items() if text)
    return Markup("<br>".join(lines))
