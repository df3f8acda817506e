"""``flower-ext settings``: list the settings of an app with their defaults and meanings.

The command reads the app's ``pyproject.toml`` (see `flower_ext.cli.project`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape

from flower_ext.cli.project import SECTION, checked_settings, choices_of, comments_of
from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.files import write_whole
from flower_ext.runs.page import Markup, escaped
from flower_ext.runs.page import table as markdown_table

_PAGE = """# Settings

Each is a `--set name=value` of `flower-ext run`, and a name in `[tool.flwr.app.config]` of an app
of your own that reads its settings by `flower_ext.federation.configured`.

Written by `flower-ext settings apps/* --markdown docs/settings.md` from the comments in each app's
`pyproject.toml`: change them there.

"""


class Setting(NamedTuple):
    """The default, the choices and the meaning of one setting, as text."""

    default: str
    choices: str
    meaning: str


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
    markdown: Annotated[
        Path | None, typer.Option(help="Write one table of all apps to this Markdown file instead.")
    ] = None,
) -> None:
    """List the settings of an app: names for --set, defaults, choices and meanings.

    Example: flower-ext settings apps/dp2-fedsam
    """
    found = {app.resolve().name: settings_of(app) for app in apps}
    if markdown is not None:
        write_whole(markdown, as_markdown(found).encode(), private=False)
        return
    for app, own in found.items():
        shown = titled_table(f"Settings of {app}", ("setting", *Setting._fields))
        for name, setting in own.items():
            shown.add_row(name, *map(escape, setting))
        console.print(shown)


def settings_of(app: Path) -> dict[str, Setting]:
    """Return the settings of an app by name, in the order of its ``pyproject.toml``.

    Raises
    ------
    InvalidValue
        The folder is not a Flower app, or the app has no settings.
    """
    defaults, _ = checked_settings(app, ())
    if not defaults:
        raise InvalidValue(f"{app} has no settings: add {SECTION} to its pyproject.toml")
    comments = comments_of(app, defaults)
    rows = {}
    for name, default in defaults.items():
        choices, meaning = choices_of(comments[name])
        if isinstance(default, bool):
            choices = "true | false"
        rows[name] = Setting(json.dumps(default).strip('"') or '""', choices, meaning)
    return rows


def as_markdown(found: dict[str, dict[str, Setting]]) -> str:
    """Return a Markdown page with one table: a row for each setting, a column for each app."""
    apps = sorted(found)
    lines = []
    for name in dict.fromkeys(name for app in apps for name in found[app]):
        own = {app: found[app][name] for app in apps if name in found[app]}
        defaults = [Markup(f"`{own[app].default}`") if app in own else "–" for app in apps]
        choices = _told({app: setting.choices for app, setting in own.items()})
        meaning = _told({app: setting.meaning for app, setting in own.items()})
        lines.append([Markup(f"`{name}`"), *defaults, choices, meaning])
    return _PAGE + markdown_table(["setting", *apps, "choices", "meaning"], lines) + "\n"


def _told(by_app: dict[str, str]) -> Markup:
    """Return a setting's text: once if all apps agree, otherwise with the names of the apps."""
    apps = {text: [app for app in by_app if by_app[app] == text] for text in by_app.values()}
    if len(apps) == 1:
        return Markup(escaped(*apps))
    told = (f"*{', '.join(own)}*: {escaped(text)}" for text, own in apps.items() if text)
    return Markup("<br>".join(told))
