"""The places of tests and helpers, so that the path of a module leads to its tests."""

import re
import subprocess
from pathlib import Path

from pathspec import GitIgnoreSpec

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "flower_ext"
ELSEWHERE = {
    "apps": "tests of the folder apps/",
    "benchmarks": "tests of the folder benchmarks/",
    "docs": "tests of the folder docs/, and of README",
}
PAGE_PATH = re.compile(r"`((?:benchmarks|docs|flower_ext|plugins|tests)/[\w/.-]+)`")
TEST_PATH = re.compile(r"(?<=\s)(?:plugins/\w+/)?tests/[\w/.]+")
HELPERS = {
    "support": "fixtures, worlds, recorders and plain loops that several test modules use",
    "faults": "the library of faults, which benchmarks/faults.py runs as well",
}
ANOTHER_TEST = re.compile(r"^\s*from \.|^\s*(from|import) tests\b.*\btest_\w+", re.MULTILINE)


def room(path: Path) -> str:
    """Return the folder below ``tests/`` that contains ``path``."""
    return path.relative_to(TESTS).parts[0]


def modules() -> list[Path]:
    """Return all test modules except this one and helpers."""
    every = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    return [path for path in every if room(path) not in HELPERS]


def test_no_test_module_takes_anything_from_another():
    taking = [path for path in modules() if ANOTHER_TEST.search(path.read_text(encoding="utf-8"))]
    assert len(modules()) > 100
    assert taking == []


def test_every_folder_of_tests_is_named_as_the_room_that_it_tests():
    folders = {path.parent for path in modules() if room(path) not in ELSEWHERE}
    assert [f for f in folders if not (PACKAGE / f.relative_to(TESTS)).is_dir()] == []


def test_helpers_lie_in_the_folders_of_helpers_alone():
    known = {"__init__", "conftest"}
    helpers = [p for p in modules() if p.stem not in known and not p.stem.startswith("test_")]
    assert helpers == []


def test_git_ignores_no_module_which_a_wheel_would_then_lack():
    ignored = GitIgnoreSpec.from_lines((PACKAGE.parent / ".gitignore").read_text().splitlines())
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "apps").rglob("*.py"), *TESTS.rglob("*.py")]
    names = [path.relative_to(PACKAGE.parent).as_posix() for path in files]
    assert [name for name in names if ignored.match_file(name)] == []


def test_all_tests_that_the_makefile_names_exist():
    commands = ["make", "--dry-run", "test-core", "nightly"]
    output = subprocess.run(
        commands, cwd=PACKAGE.parent, check=True, capture_output=True, text=True
    )
    paths = TEST_PATH.findall(output.stdout)
    assert len(paths) > 10
    assert [path for path in paths if not (PACKAGE.parent / path).exists()] == []


def test_all_files_that_contributing_names_exist():
    paths = PAGE_PATH.findall((PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(paths) > 10
    assert [path for path in paths if not (PACKAGE.parent / path).exists()] == []
