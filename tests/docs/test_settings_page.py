"""The tables of all settings have what the apps declare."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

from flower_ext.runs.app_settings import declared_settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module():
    spec = importlib.util.spec_from_file_location(
        "settings_page", DOCS / "assets" / "settings_page.py"
    )
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_hook_adds_every_apps_settings_to_its_page_only():
    built = module()

    def page_of(name):
        file = SimpleNamespace(src_uri=name)
        return built.on_page_markdown(
            "# Title", page=SimpleNamespace(file=file), config={}, files=[]
        )

    assert page_of("index.md") == "# Title"
    text = page_of("settings.md")
    folders = [path.parent for path in (ROOT / "apps").glob("*/pyproject.toml")]
    names = {name for folder in folders for name in declared_settings(folder)[0]}
    assert len(folders) > 5
    assert {name for name in names if text.count(f"| `{name}` |") != 1} == set()


def test_a_setting_of_several_apps_is_described_once_with_differences():
    first, second = ("one | two", "first [of some]"), ("one | two", "2nd [of some]")
    rows = {
        "a": {"x": ("one", *first), "z": ("no", "true | false", "on")},
        "b": {"x": ("two", *second)},
        "c": {"x": ("two", *first), "y": ("0.5", "", "half"), "z": ("no", "true | false", "on")},
    }
    defaults = "*a*: `one`<br>*b, c*: `two`"
    meanings = r"*a, c*: first \[of some\] (one \| two)<br>*b*: 2nd \[of some\] (one \| two)"
    lines = module().tables(rows).splitlines()
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
