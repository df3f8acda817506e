"""``flower-ext settings``: what can be set in an app, its default, and what it means."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_ext.cli.launch import LaunchFailed
from flower_ext.cli.screen import console, titled_table
from flower_ext.runs.report import table as markdown_table

_SECTION = "[tool.flwr.app.config]"
_LINE = re.compile(r'(?P<name>[\w-]+) *= *(?P<value>"[^"]*"|[^#\n]*?) *(?:# *(?P<meaning>.*))?')
_MORE = re.compile(r"\s*# *(?P<meaning>.*)")


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="One table of all apps, as docs/settings.md is.")
    ] = False,
) -> None:
    """List the settings of an app: names for --set, defaults, and what they mean.

    Example: flower-ext settings apps/dp2_fedsam
    """
    found = {app.name: settings_of(app) for app in apps}
    if markdown:
        print(as_markdown(found))
        return
    for app, rows in found.items():
        shown = titled_table(f"Settings of {app}", ("setting", "default", "meaning"))
        for name, (default, meaning) in rows.items():
            shown.add_row(name, default, meaning)
        console.print(shown)


def settings_of(app: Path) -> dict[str, tuple[str, str]]:
    """Return default and meaning of each setting in an app's ``pyproject.toml``, in its order.

    Raises
    ------
    LaunchFailed
        It is not a Flower app with settings.
    """
    file = app / "pyproject.toml"
    if not file.is_file():
        raise LaunchFailed(f"{app} holds no pyproject.toml: it is not a Flower app")
    _, section, rest = file.read_text(encoding="utf-8").partition(_SECTION)
    if not section:
        raise LaunchFailed(f"{file} has no {_SECTION}")
    rows: dict[str, tuple[str, str]] = {}
    for line in re.split(r"^\[", rest, flags=re.MULTILINE)[0].splitlines():
        if found := _LINE.fullmatch(line):
            rows[found["name"]] = found["value"], found["meaning"] or ""
        elif rows and (more := _MORE.fullmatch(line)):
            name, (default, meaning) = rows.popitem()
            rows[name] = default, f"{meaning} {more['meaning']}".strip()
    assert rows.keys() == _parsed(file).keys()
    return rows


def as_markdown(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return one table of the settings of several apps; a dash where an app has it not."""
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    cells = []
    for name in names:
        told = dict.fromkeys(rows[name][1] for rows in found.values() if name in rows)
        meanings = [meaning for meaning in told if meaning]
        defaults = [f"`{rows[name][0]}`" if name in rows else "–" for rows in found.values()]
        cells.append([f"`{name}`", *defaults, "; ".join(meanings)])
    return markdown_table(["setting", *found, "meaning"], cells)


def _parsed(file: Path) -> dict[str, Any]:
    project = tomllib.loads(file.read_text(encoding="utf-8"))
    config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return config
