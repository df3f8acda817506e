"""Text that every Python brings along: documentation, which is public here, and source code.

Half of the standard library's modules are *public*: the prose in their docstrings and in the topics
of ``help()`` trains the tiny base model, and no guarantee covers it. The functions of the other
modules play the part of private texts, of a kind that the base model never saw: a client is
a person who wrote a few functions of one module.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flower_ext.data import DataNotFound

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PROSE = re.compile(r"[A-Za-z ,.;:'\"-]{60,}")


@cache
def public_text() -> str:
    """Return paragraphs of prose from ``help()`` and all public modules, one paragraph a line."""
    from pydoc_data.topics import topics

    documents = [text for module in _modules()[0] for text in _docstrings(module)]
    lines = (
        " ".join(paragraph.split())
        for text in [*topics.values(), *documents]
        for paragraph in text.split("\n\n")
    )
    return "\n".join(filter(_PROSE.fullmatch, lines))


@cache
def private_functions() -> tuple[tuple[str, ...], ...]:
    """Return, for each private module, the source code of its functions and methods.

    Modules without functions are left out. The order of the modules looks random, but is always
    the same.
    """
    functions = (tuple(_functions(module)) for module in _modules()[1])
    return tuple(filter(None, functions))


def _modules() -> tuple[list[Path], list[Path]]:
    """Return the files of the public modules, and the files of the private modules.

    The digest of a module's name decides in which list its file is, and at which place.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    public, private = {}, {}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not _LEFT_OUT & {*name.parts}:
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            (private if digest[0] % 2 else public)[digest] = path
    if not (public and private):
        raise DataNotFound(
            f"dataset='python': {library} has no source code of Python; set dataset='folder'"
        )
    return [public[key] for key in sorted(public)], [private[key] for key in sorted(private)]


def _docstrings(module: Path) -> list[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _functions(module: Path) -> Iterator[str]:
    """Yield the source code of each function and method, without its decorators.

    A function inside another one is not yielded separately.
    """
    code = module.read_text(encoding="utf-8")
    lines, nodes = code.split("\n"), [*ast.parse(code).body]
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            nodes.extend(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            indent, body = " " * node.col_offset, lines[node.lineno - 1 : node.end_lineno]
            yield "\n".join(line.removeprefix(indent) for line in body)
