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


def test_a_setting_of_several_apps_is_described_once_and_what_differs_with_the_apps():
    first, second = ("one | two", "first [of some]"), ("one | two", "2nd [of some]")
    rows = {
        "a": {"x": ("one", *first), "z": ("no", "true | false", "on")},
        "b": {"x": ("two", *second)},
        "c": {"x": ("two", *first), "y": ("0.5", "", "half"), "z": ("no", "true | false", "on")},
    }
    defaults = "*a*: `one`<br>*b, c*: `two`"
    meanings = r"*a, c*: first \[of some\] (one \| two)<br>*b*: 2nd \[of some\] (one \| two)"
    lines = module().page(rows).splitlines()
    assert lines[-12:] == [
        "## Of several apps",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
        f"| `x` | {defaults} | {meanings} |",
        "| `z` | `no` (not b) | on |",
        "",
        "## Of c alone",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
        "| `y` | `0.5` | half |",
    ]
