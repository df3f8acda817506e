"""Docstrings begin with a verb or a plain noun phrase, and names of tests are plain English."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.same_code import is_docstring

ROOT = Path(__file__).parents[1]
MOST_WORDS = 12
OLD_WORDS = re.compile(r"_(told|goes_on|who|own|nor|speaks_of|company|all_the_same)(_|$)")
OLD_VARIABLES = frozenset({"heard", "own", "told", "who"})
RIDDLE = re.compile(r"\s*(What|How|Whether|Who|Whose|That of|Those of)\b")
QUOTED_RIDDLE = re.compile(r"['\"]" + RIDDLE.pattern)


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its functions, classes and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if is_docstring(statement):
                yield statement.value.value


def openings(source: str) -> list[str]:
    """Return the first lines of the docstrings that begin as a riddle does."""
    if not QUOTED_RIDDLE.search(source):  # parsing all modules takes a second
        return []
    return [text.splitlines()[0] for text in docstrings(source) if RIDDLE.match(text)]


def names_to_change(source: str) -> list[str]:
    """Return the names of tests with an old word, or with too many words."""
    names = re.findall(r"^ *def (test_\w+)", source, re.MULTILINE)
    return [name for name in names if OLD_WORDS.search(name) or name.count("_") > MOST_WORDS]


def variables_to_change(source: str) -> list[str]:
    """Return the variables and arguments whose name does not say what they hold."""
    if OLD_VARIABLES.isdisjoint(re.findall(r"\w+", source)):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return [name for name in names if name in OLD_VARIABLES]


def modules_of_tests(pattern: str = "test_*.py") -> list[Path]:
    """Return the modules of tests of the package and its plug-ins."""
    folders = (ROOT / "tests", *(ROOT / "plugins").glob("*/tests"))
    return sorted(path for folder in folders for path in folder.rglob(pattern))


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
    openings_found = {path: openings(path.read_text(encoding="utf-8")) for path in modules()}
    assert {path.as_posix(): lines for path, lines in openings_found.items() if lines} == {}


@pytest.mark.parametrize(
    "name", ["a_client_is_told", "who_answers_counts", "its_own", "_".join("abcdefghijklm")]
)
def test_an_old_word_or_a_long_name_is_found(name):
    assert names_to_change(f"def test_{name}():\n    pass\n") == [f"test_{name}"]


def test_each_test_states_its_property_in_few_plain_words():
    names_found = {
        path: names_to_change(path.read_text(encoding="utf-8")) for path in modules_of_tests()
    }
    assert {path.as_posix(): names for path, names in names_found.items() if names} == {}


@pytest.mark.parametrize("source", ["told = 1", "for own in []: pass", "lambda who: 0"])
def test_a_variable_with_an_old_word_is_found(source):
    assert len(variables_to_change(source)) == 1


def test_each_variable_of_tests_says_what_it_holds():
    names_found = {
        path: variables_to_change(path.read_text(encoding="utf-8"))
        for path in modules_of_tests("*.py")
    }
    assert {path.as_posix(): names for path, names in names_found.items() if names} == {}
