"""``flower-ext settings``: what can be set in an app, its default, and what it means.

All of it is in the app's ``pyproject.toml``, where a comment follows each setting: words to choose
from, as ``poisson | everyone``, a colon, and what the setting means.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from flower_ext.cli.launch import LaunchFailed, checked_settings
from flower_ext.cli.screen import console, titled_table
from flower_ext.runs.files import write_whole
from flower_ext.runs.report import Markup, escaped
from flower_ext.runs.report import table as markdown_table

_LINE = re.compile(r'(?P<name>[\w-]+) *= *(?:"[^"]*"|[^#"]*?) *(?:# *(?P<comment>.*))?')
_MORE = re.compile(r"\s+# *(?P<comment>.*)")
_CHOICES = re.compile(r"(?P<choices>[\w.-]+(?: \| [\w.-]+)+)(?:: (?P<meaning>.*))?")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of an app."""

    default: str
    choices: str
    meaning: str


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
    markdown: Annotated[
        Path | None, typer.Option(help="File to write: one table of all apps.")
    ] = None,
) -> None:
    """List the settings of an app: names for --set, defaults, choices, and what they mean.

    Example: flower-ext settings apps/dp2_fedsam
    """
    found = {app.resolve().name: settings_of(app) for app in apps}
    if markdown is not None:
        write_whole(markdown, as_markdown(found).encode(), private=False)
        return
    for app, rows in found.items():
        shown = titled_table(f"Settings of {app}", ("setting", "default", "choices", "meaning"))
        for name, row in rows.items():
            shown.add_row(name, *map(escape, (row.default, row.choices, row.meaning)))
        console.print(shown)


def settings_of(app: Path) -> dict[str, Setting]:
    """Return the settings of an app by name, in the order of its ``pyproject.toml``.

    Raises
    ------
    LaunchFailed
        It is not a Flower app with settings.
    """
    defaults, _ = checked_settings(app, ())
    if not defaults:
        raise LaunchFailed(f"{app} has no settings: add [tool.flwr.app.config] to pyproject.toml")
    comments: dict[str, str] = {}
    _, _, rest = (app / "pyproject.toml").read_text("utf-8").partition("[tool.flwr.app.config]")
    for line in rest.partition("\n[")[0].splitlines():
        if found := _LINE.fullmatch(line):
            name = found["name"]
            comments[name] = found["comment"] or ""
        elif comments and (more := _MORE.fullmatch(line)):
            comments[name] += f" {more['comment']}"
    return {name: _setting(value, comments.get(name, "")) for name, value in defaults.items()}


def _setting(default: Any, comment: str) -> Setting:
    found = _CHOICES.fullmatch(comment)
    choices, meaning = (found["choices"], found["meaning"] or "") if found else ("", comment)
    if isinstance(default, bool):
        choices = "true | false"
    shown = json.dumps(default).strip('"') or '""'
    return Setting(default=shown, choices=choices, meaning=meaning)


def as_markdown(found: dict[str, dict[str, Setting]]) -> str:
    """Return one table of the settings of several apps; a dash where an app has it not."""
    found = dict(sorted(found.items()))
    rows = []
    for name in dict.fromkeys(name for own in found.values() for name in own):
        own = {app: settings[name] for app, settings in found.items() if name in settings}
        defaults = [Markup(f"`{own[app].default}`") if app in own else "–" for app in found]
        choices = _told({app: setting.choices for app, setting in own.items()})
        meaning = _told({app: setting.meaning for app, setting in own.items()})
        rows.append([Markup(f"`{name}`"), *defaults, choices, meaning])
    return _PAGE + markdown_table(["setting", *found, "choices", "meaning"], rows) + "\n"


def _told(by_app: dict[str, str]) -> Markup:
    """What is told of a setting, once, or of each app where they differ."""
    apps = {text: [app for app in by_app if by_app[app] == text] for text in by_app.values()}
    if len(apps) == 1:
        return Markup(escaped(*apps))
    told = (f"*{', '.join(own)}*: {escaped(text)}" for text, own in apps.items() if text)
    return Markup("<br>".join(told))


_PAGE = """# Settings

Each is a `--set name=value` of `flower-ext run`, and a name in `[tool.flwr.app.config]` of an app
of your own that reads its settings by `flower_ext.federation.configured`.

Written by `flower-ext settings apps/* --markdown docs/settings.md` from the comments in each app's
`pyproject.toml`: change them there.

"""
