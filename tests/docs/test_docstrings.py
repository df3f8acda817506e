"""Run the examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

import flower_ext

ROOT = Path(flower_ext.__file__).parent
MODULES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
    for file in sorted(ROOT.rglob("*.py"))
    if ">>>" in file.read_text()
]


def test_some_docstring_has_an_example():
    assert MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
