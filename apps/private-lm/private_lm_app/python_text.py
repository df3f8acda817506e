"""Text that every Python brings along: documentation, which is public here, and source code.

A third of the standard library's modules is *public*: the docstrings of these modules and the
topics of ``help()`` train the tiny base model, and no guarantee covers them. The source code of the
other modules plays the part of people's private texts.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from functools import cache
from pathlib import Path

from flower_ext.data import DataNotFound

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PUBLIC_SHARE = 3
"""One module in so many is public."""


@cache
def public_text() -> str:
    """Return the topics of ``help()``, then the docstrings of all public modules."""
    from pydoc_data.topics import topics

    documents = (document for module in _modules()[0] for document in _docstrings(module))
    return "\n\n".join([*topics.values(), *documents])


@cache
def private_modules() -> tuple[str, ...]:
    """Return the source code of each private module, in a fixed random order."""
    return tuple(module.read_text(encoding="utf-8") for module in _modules()[1])


def _modules() -> tuple[list[Path], list[Path]]:
    """Return the files of public and of private modules, by the digest of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    public, private = {}, {}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not _LEFT_OUT & {*name.parts}:
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            (private if digest[0] % PUBLIC_SHARE else public)[digest] = path
    if not (public and private):
        raise DataNotFound(
            f"dataset='python': no source code in {library}, as in a Python without sources; "
            "expected dataset='folder'"
        )
    return [public[key] for key in sorted(public)], [private[key] for key in sorted(private)]


def _docstrings(module: Path) -> list[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return [text for node in nodes if (text := ast.get_docstring(node))]
