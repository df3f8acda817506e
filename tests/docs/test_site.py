"""The site: it builds strictly, fetches nothing, and its reference holds every public name."""

import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT, anchor, links, pages

ROOMS = [
    "flower_ext.algorithms",
    "flower_ext.data",
    "flower_ext.federation",
    "flower_ext.metrics",
    "flower_ext.privacy",
    "flower_ext.runs",
    "flower_ext.secure",
    "flower_ext.training",
    "flower_ext_audit",
]
DRAW = importlib.util.spec_from_file_location("draw", DOCS / "assets" / "draw.py")


def test_every_link_between_pages_leads_somewhere():
    broken = []
    for page in pages():
        for target, fragment in links(page):
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                broken.append((page.name, target))
            elif fragment and path.suffix == ".md" and path.parent.name != "reference":
                text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
                headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
                if fragment not in {anchor(heading) for heading in headings}:
                    broken.append((page.name, f"{target}#{fragment}"))
    assert broken == []


def test_every_public_name_is_in_the_reference_once():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^::: (.*)$", text, re.MULTILINE)
    assert len(named) == len(set(named)) > 150
    shown = {name.rpartition(".")[2] for name in named}
    missing = {room: sorted(set(import_module(room).__all__) - shown) for room in ROOMS}
    assert {room: names for room, names in missing.items() if names} == {}


def test_the_committed_figures_are_those_that_the_script_draws():
    assert DRAW is not None
    assert DRAW.loader is not None
    module = importlib.util.module_from_spec(DRAW)
    sys.modules["draw"] = module
    DRAW.loader.exec_module(module)
    for name, draw in module.FIGURES.items():
        svg = (DOCS / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        assert svg == draw().svg(), f"{name}.svg is stale: run python docs/assets/draw.py"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.full
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocstrings", reason="pip install -c constraints.txt -e '.[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(
            r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"|<link[^>]*rel="(?:stylesheet|'
            r'preconnect|icon)"[^>]*href="(?:https?:)?//[^"]*"',
            text,
        )
        assert fetched == [], Path(page).name
