"""Prove that two revisions differ in strings and comments only.

``python -m tests.support.same_code REV_A REV_B [paths…]`` compares every Python file that differs
between the two revisions; ``.`` as ``REV_B`` means the working tree. It prints each file whose code
differs and then exits with 1. Commits whose subject begins with "English:" must pass.

Comments never reach the syntax tree. Docstrings are dropped from it, string constants are blanked,
and an f-string is reduced to the multiset of its formatted expressions, so that words may move
around an expression but no expression may appear, vanish or change.

A blanked string may be a name, a key or a format. The script therefore lists strings that changed
outside docstrings and messages (``raise``, warnings, logs, help texts) for a reader to look at.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKING_TREE = "."
LOGGERS = {"log", "logger", "logging", "_log", "LOG"}
MESSAGE_CALLS = {"warn", "InvalidValue", "ProtocolError", "IncompleteRound", "Option", "Argument"}
"""Functions whose string arguments are read by people."""
CODE_IN_MESSAGES = (ast.FormattedValue, ast.Compare, ast.Subscript, ast.Dict)
"""Nodes whose strings are code even inside a message."""


def is_docstring(statement: ast.stmt) -> bool:
    """Return True for a statement that is a lone string: it documents what stands before it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class _Blank(ast.NodeTransformer):
    """Replace every string by an empty one, and every f-string by its sorted expressions."""

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                kept = [statement for statement in statements if not is_docstring(statement)]
                setattr(node, field, kept or ([ast.Pass()] if statements else []))
        result: ast.AST = super().visit(node)
        return result

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        formatted = [value for value in node.values if isinstance(value, ast.FormattedValue)]
        if not formatted:
            return ast.Constant("")
        return ast.Constant(tuple(sorted(_formatted(value) for value in formatted)))


def _formatted(value: ast.FormattedValue) -> str:
    """Return one formatted expression as text: its own strings blanked, its format kept."""
    specification = "" if value.format_spec is None else ast.dump(value.format_spec)
    return f"{ast.dump(_Blank().visit(value.value))} !{value.conversion} :{specification}"


def code_of(source: str) -> str:
    """Return a module's syntax tree as text, without docstrings and without words."""
    return ast.dump(_Blank().visit(ast.parse(source)))


def strings_outside_messages(source: str) -> Counter[str]:
    """Count the strings of a module that are neither docstrings nor parts of a message."""
    return Counter(_strings(ast.parse(source), in_message=False))


def _strings(node: ast.AST, *, in_message: bool) -> Iterator[str]:
    """Yield the texts in code that are no docstrings and no messages."""
    if isinstance(node, ast.stmt) and is_docstring(node):
        return
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and not in_message:
            yield node.value
        return
    inside = (in_message or _is_message(node)) and not isinstance(node, CODE_IN_MESSAGES)
    for child in ast.iter_child_nodes(node):
        yield from _strings(child, in_message=inside)


def _is_message(node: ast.AST) -> bool:
    """Return True if a node's texts are messages to users."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.keyword):
        return node.arg == "help"
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        of = node.func.value
        return node.func.attr in MESSAGE_CALLS or (isinstance(of, ast.Name) and of.id in LOGGERS)
    return isinstance(node.func, ast.Name) and node.func.id in MESSAGE_CALLS


def compare(before: str | None, after: str | None) -> tuple[bool, list[str]]:
    """Return True where two sources have the same code, and the strings to look at.

    None stands for a file that one revision lacks.
    """
    if before is None or after is None:
        return False, []
    try:
        old, new = strings_outside_messages(before), strings_outside_messages(after)
    except SyntaxError as error:
        return False, [f"line {error.lineno}: {error.msg}"]
    changed = [f"- {text!r}" for text in old - new] + [f"+ {text!r}" for text in new - old]
    return code_of(before) == code_of(after), changed


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    ).stdout


def _source(revision: str, name: str) -> str | None:
    """Return a file as it stands in a revision; None where it does not exist."""
    if revision == WORKING_TREE:
        path = ROOT / name
        return path.read_text(encoding="utf-8") if path.exists() else None
    if not _git("ls-tree", revision, "--", name):
        return None
    return _git("show", f"{revision}:{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the files that differ in code; return 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", metavar="REV_A")
    parser.add_argument("after", metavar="REV_B", help="a revision, or . for the working tree")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args(arguments)
    revisions = [given.before, *([] if given.after == WORKING_TREE else [given.after])]
    names = _git("diff", "--name-only", "--no-renames", *revisions, "--", *given.paths).split("\n")
    different = []
    for name in sorted(name for name in names if name.endswith(".py")):
        same, strings = compare(_source(given.before, name), _source(given.after, name))
        if not same:
            different.append(name)
            print(f"{name}: code differs")
        if strings:
            print(f"{name}: strings changed elsewhere", *strings, sep="\n    ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
