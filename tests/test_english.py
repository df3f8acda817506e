"""Docstrings begin with a verb or a plain noun phrase."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.same_code import is_docstring

ROOT = Path(__file__).parents[1]
RIDDLE = re.compile(r"\s*(What|How|Whether|Who|Whose|That of|Those of)\b")


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its functions, classes and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if is_docstring(statement):
                yield statement.value.value


def openings(source: str) -> list[str]:
    """Return the first lines of the docstrings that begin as a riddle does."""
    return [text.splitlines()[0] for text in docstrings(source) if RIDDLE.match(text)]


def modules() -> list[Path]:
    """Return the modules of package, plug-ins, apps and benchmarks."""
    plug_ins = (ROOT / "plugins").glob("*/flower_ext_*")
    folders = (ROOT / "flower_ext", *plug_ins, ROOT / "apps", ROOT / "benchmarks")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("word", ["What", "How", "Whether", "Who", "Whose", "That of", "Those of"])
def test_an_opening_that_makes_the_reader_guess_is_found(word):
    source = f'class Sum:\n    """A sum."""\n\n    bound: float\n    """{word} it adds up."""\n'
    assert openings(source) == [f"{word} it adds up."]


def test_no_docstring_begins_with_a_question_word():
    found = {path: openings(path.read_text(encoding="utf-8")) for path in modules()}
    assert {path.as_posix(): lines for path, lines in found.items() if lines} == {}
