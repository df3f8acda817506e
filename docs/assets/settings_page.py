"""Write the table of all settings: ``python docs/assets/settings_page.py`` writes settings.md."""

from __future__ import annotations

from pathlib import Path

from flower_ext.cli.project import rows_of
from flower_ext.runs.page import Markup, escaped, table

ROOT = Path(__file__).parents[2]
HEAD = """# Settings

Each is a `--set name=value` of `flower-ext run`, and a name in `[tool.flwr.app.config]` of an app
of your own whose class of settings declares it (see [Let settings
choose](guides/drop-in.md#let-settings-choose)).

Written by `python docs/assets/settings_page.py` from the defaults in each app's `pyproject.toml`
and the texts in its `settings.py`, or in `flower_ext/runs/shared_settings.py` for the settings that
apps share: change them there.

"""


def page(apps: dict[str, dict[str, tuple[str, str, str]]]) -> str:
    """Return a Markdown page with one table: a row for each setting, a column for each app."""
    names = sorted(apps)
    lines = []
    for setting in dict.fromkeys(setting for app in names for setting in apps[app]):
        rows = {app: apps[app][setting] for app in names if setting in apps[app]}
        defaults = [Markup(f"`{rows[app][0]}`") if app in rows else "–" for app in names]
        choices = by_app({app: choices for app, (_, choices, _) in rows.items()})
        meaning = by_app({app: meaning for app, (*_, meaning) in rows.items()})
        lines.append([Markup(f"`{setting}`"), *defaults, choices, meaning])
    return HEAD + table(["setting", *names, "choices", "meaning"], lines) + "\n"


def by_app(texts: dict[str, str]) -> Markup:
    """Return a setting's text: once if all apps agree, otherwise with the names of the apps."""
    apps = {text: [app for app in texts if texts[app] == text] for text in texts.values()}
    if len(apps) == 1:
        return Markup(escaped(*apps))
    lines = (f"*{', '.join(names)}*: {escaped(text)}" for text, names in apps.items() if text)
    return Markup("<br>".join(lines))


def of_apps() -> str:
    """Return the page of the apps in this checkout."""
    folders = sorted(path.parent for path in (ROOT / "apps").glob("*/pyproject.toml"))
    return page({folder.name: rows_of(folder) for folder in folders})


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(of_apps(), encoding="utf-8")
