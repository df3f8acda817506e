"""Add the tables of all settings to settings.md when MkDocs builds the site.

The defaults are in each app's ``pyproject.toml``, the meanings in its ``settings.py``, or in
``flower_ext/runs/shared_settings.py`` for the settings that apps share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flower_ext.cli.settings_table import rows_of
from flower_ext.runs.page import Markup, escaped, table

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
Rows = Mapping[str, Mapping[str, tuple[str, str, str]]]
"""Default, choices and meaning of each setting, by app and setting."""


def tables(apps: Rows) -> str:
    """Return tables in Markdown: the settings of several apps, then those of each app alone."""
    settings = dict.fromkeys(setting for rows in apps.values() for setting in rows)
    users = {name: [app for app in sorted(apps) if name in apps[app]] for name in settings}
    shared = {name: using for name, using in users.items() if len(using) > 1}
    parts = [section("Of several apps", apps, shared, everyone=len(apps))]
    for app in sorted(apps):
        if alone := {name: using for name, using in users.items() if using == [app]}:
            parts.append(section(f"Of {app} alone", apps, alone, everyone=1))
    return "\n".join(parts)


def section(title: str, apps: Rows, users: Mapping[str, list[str]], *, everyone: int) -> str:
    """Return a heading and a table of settings, each with the apps that have it or lack it."""
    lines = []
    for name, using in users.items():
        rows = {app: apps[app][name] for app in using}
        defaults = by_app({app: f"`{default}`" for app, (default, *_) in rows.items()})
        if len(using) < everyone and len(set(rows.values())) == 1:
            lacking = [app for app in sorted(apps) if app not in using]
            few = f"not {lacking[0]}" if len(lacking) == 1 else ", ".join(using)
            defaults = Markup(f"{defaults} ({few})")
        texts = {app: text(choices, meaning) for app, (_, choices, meaning) in rows.items()}
        lines.append([Markup(f"`{name}`"), defaults, by_app(texts)])
    return f"## {title}\n\n{table(['setting', 'default', 'meaning'], lines)}\n"


def text(choices: str, meaning: str) -> str:
    """Return a setting's meaning and its choices; those of a switch are known."""
    if choices in ("", "true | false"):
        return escaped(meaning)
    return escaped(f"{meaning} ({choices})")


def by_app(texts: Mapping[str, str]) -> Markup:
    """Return a setting's text: once if all apps agree, otherwise with the names of the apps."""
    apps = {text: [app for app in texts if texts[app] == text] for text in texts.values()}
    if len(apps) == 1:
        return Markup(*apps)
    return Markup("<br>".join(f"*{', '.join(apps[text])}*: {text}" for text in apps if text))


def tables_of_apps() -> str:
    """Return the tables of the apps in this checkout."""
    folders = sorted(path.parent for path in (ROOT / "apps").glob("*/pyproject.toml"))
    return tables({folder.name: rows_of(folder) for folder in folders})


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page, with the tables if it is that of the settings. MkDocs calls this hook."""
    return f"{markdown}\n{tables_of_apps()}" if page.file.src_uri == "settings.md" else markdown
