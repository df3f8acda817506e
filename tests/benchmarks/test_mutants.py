"""The planted faults: each changes behaviour, and none changes code that tests should not fix."""

import ast
import os
import subprocess
import sys

import pytest

from benchmarks.mutants import catalogue
from benchmarks.mutants.catalogue import ROOT, TESTS, source_of, stale_entries
from benchmarks.mutants.faults import faults_of
from tests.support.grids import grid

SOURCE = b'''"""Text with 1 < 2."""
LIMIT: Literal[3] = 4  # \xc3\xa9 before the next
def f(a, b=True):
    if a < 1 and not b:
        raise ValueError(f"a={a!r}: {1 + 1}")
    total = "\xc3\xa9" in a or min(a, -2.5) * b ** 2
    total += 1
    return total
'''


def test_faults_are_planted_where_they_belong_and_nowhere_in_texts_or_annotations():
    planted = {fault.planted(SOURCE).decode() for fault in faults_of(SOURCE)}
    lines = SOURCE.decode().splitlines()
    changed = {
        (old.strip(), new.strip())
        for text in planted
        for old, new in zip(lines, text.splitlines(), strict=True)
        if old != new
    }
    condition = "if a < 1 and not b:"
    total = 'total = "é" in a or min(a, -2.5) * b ** 2'
    expected = {
        (lines[1], lines[1].replace("4", "5")),
        (lines[2], lines[2].replace("True", "False")),
        (condition, "if a <= 1 and not b:"),
        (condition, "if a < 2 and not b:"),
        (condition, "if a < 1 or not b:"),
        (condition, "if a < 1 and b:"),
        (condition, "if not (a < 1 and not b):"),
        ('raise ValueError(f"a={a!r}: {1 + 1}")', "pass"),
        (total, total.replace("in a", "not in a")),
        (total, total.replace("or", "and")),
        (total, total.replace("min", "max")),
        (total, total.replace("-2.5", "2.5")),
        (total, total.replace("2.5", "5.0")),
        (total, total.replace(" * ", " / ")),
        (total, total.replace("**", "*")),
        (total, total.replace("** 2", "** 3")),
        ("total += 1", "pass"),
        ("total += 1", "total += 2"),
    }
    assert changed == expected


@pytest.mark.parametrize("module", grid(TESTS, {"privacy/mechanisms/bounds.py"}.__contains__))
def test_every_fault_in_a_module_is_another_program_that_can_be_read(module):
    source = source_of(module)
    whole = ast.dump(ast.parse(source))
    for fault in faults_of(source):
        assert ast.dump(ast.parse(fault.planted(source))) != whole


@pytest.mark.full
def test_every_fault_that_no_test_can_find_can_be_planted(monkeypatch):
    assert stale_entries() == []
    moved = {
        "module": "privacy/accounting/renyi.py",
        "line": "_MARGIN = 0.0",
        "reason": "another line",
    }
    monkeypatch.setattr(catalogue, "read_equivalent", lambda: [moved])
    assert stale_entries() == [moved]


def test_every_module_and_test_that_the_map_names_exists():
    for module, tests in TESTS.items():
        assert (ROOT / "flower_ext" / module).is_file(), module
        assert all((ROOT / "tests" / path).exists() for path in tests), module


PLANT_A_FATAL_FAULT = """
import flower_ext.privacy.mechanisms.bounds
from benchmarks.mutants.catalogue import Mutant, source_of
from benchmarks.mutants.faults import Fault
from benchmarks.mutants.running import missed_mutants

module = "privacy/mechanisms/bounds.py"
end = len(source_of(module))
assert missed_mutants([Mutant(module, Fault(end, end, "raise RuntimeError"))]) == []
"""


@pytest.mark.full
def test_a_fault_is_found_though_the_unchanged_module_was_imported_before():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PLANT_A_FATAL_FAULT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1: found privacy/mechanisms/bounds.py" in done.stdout
