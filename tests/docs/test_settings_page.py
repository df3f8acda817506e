"""The page of all settings is what the apps say."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def module():
    spec = importlib.util.spec_from_file_location(
        "settings_page", DOCS / "assets" / "settings_page.py"
    )
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_table_in_docs_is_what_the_apps_say():
    written = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert module().of_apps() == written, "settings.md is stale: run docs/assets/settings_page.py"


def test_what_differs_between_apps_is_told_of_each():
    first, second = ("one | two", "first [of some]"), ("one | two", "2nd [of some]")
    rows = {
        "a": {"x": ("one", *first)},
        "b": {"x": ("two", *second)},
        "c": {"x": ("two", *first), "y": ("0.5", "", "half")},
    }
    meanings = r"*a, c*: first \[of some\]<br>*b*: 2nd \[of some\]"
    assert module().page(rows).splitlines()[-2:] == [
        rf"| `x` | `one` | `two` | `two` | one \| two | {meanings} |",
        "| `y` | – | – | `0.5` |  | half |",
    ]
