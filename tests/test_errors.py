"""All refused values raise one kind of error, which commands print as one message."""

import ast
from pathlib import Path

import flower_ext
from flower_ext.errors import FlowerExtError, InvalidValue

PACKAGE = Path(flower_ext.__file__).parent


def test_refused_values_can_be_caught_as_value_errors():
    assert issubclass(InvalidValue, ValueError)
    assert issubclass(InvalidValue, FlowerExtError)


def test_no_module_raises_a_bare_value_error():
    bare = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "ValueError"
    ]
    assert not bare
