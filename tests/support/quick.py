"""Check a change in a minute: lint, types, the tests of the changed modules, audits of noise.

``make quick`` checks everything that differs from the commit where the branch left ``main``. On
``main`` itself, it checks everything that is not committed. ``make quick BASE=HEAD~1`` names
another commit to compare with.

For a change of ``flower_ext/room/module.py`` it runs ``tests/room/**/test_module*.py``, and tests
that import the module, also those of plug-ins. If there are none of these, it runs the tests in the
folder of ``tests`` that has the name of the module's folder. A plug-in has its tests in its own
folder. For a changed ``__init__.py`` of the package, it also checks the names in
the reference. Other tests may depend on the module, too: ``make check`` runs all tests.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPORTED = Path("tests/docs/test_site.py")
AUDITED = "plugins/audit/tests/test_mechanisms.py"
AUDITS = {
    "flower_ext/algorithms/uldp": "uldp",
    "flower_ext/algorithms/dp_ditto": "ditto",
    "flower_ext/algorithms/upcycled": "perturbation",
    "flower_ext/algorithms": "client-noise",
    "flower_ext/privacy/perturbation": "perturbation",
    "flower_ext/privacy": "client-noise or uldp-avg or ditto",
    "flower_ext/training/dp": "uldp-group or ditto-steps",
    "flower_ext/training": "uldp-avg",
    "flower_ext/federation": "client-noise or uldp-avg",
    "plugins/audit/flower_ext_audit": "client-noise or uldp-avg or ditto",
}
"""For each path, the audits that execute it, as names for ``-k``; the longest path wins."""


def changed(base: str | None) -> list[Path]:
    """Return the Python files that differ from ``base``, new ones included."""
    against = base or (_git("merge-base", "HEAD", "main") or ["HEAD"])[0]
    names = {*_git("diff", "--name-only", "--diff-filter=d", against)}
    names |= {*_git("ls-files", "--others", "--exclude-standard")}
    return sorted(Path(name) for name in names if name.endswith(".py"))


def chosen_tests(file: Path) -> set[Path]:
    """Return the test modules, or the folder of tests, for one changed file."""
    if file.parts[0] == "tests":
        return {file} if file.name.startswith("test_") else _importing(_module(file))
    if file.parts[0] == "plugins" and len(file.parts) > 3:
        tests = Path(*file.parts[:2]) / "tests"
        named = tests / f"test_{file.stem.removeprefix('test_')}.py"
        return {named if (ROOT / named).exists() else tests}
    if file.parts[0] != "flower_ext" or len(file.parts) < 3:
        return _importing(_module(file))
    always = {EXPORTED} if file.stem == "__init__" else set()
    room = ROOT / "tests" / file.parts[1]
    named = {test.relative_to(ROOT) for test in room.rglob(f"test_{file.stem}*.py")}
    folder = ROOT / "tests" / file.parent.relative_to("flower_ext")
    mirrored = folder if folder.exists() else room
    return (named | _importing(_module(file)) or {mirrored.relative_to(ROOT)}) | always


def chosen_audits(files: Iterable[Path]) -> str:
    """Return the mechanisms to audit, as an expression for ``pytest -k``, or an empty one."""
    chosen = []
    for file in files:
        fitting = [prefix for prefix in AUDITS if file.as_posix().startswith(prefix)]
        if fitting:
            chosen.append(AUDITS[max(fitting, key=len)])
    return " or ".join(dict.fromkeys(chosen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks to their ends; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="the commit that the change began from")
    files = changed(parser.parse_args(arguments).base or None)
    if not files:
        print("no Python file differs: nothing to check")
        return 0
    tests = {str(test) for file in files for test in chosen_tests(file)}
    audits = chosen_audits(files)
    lint = [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]]
    chosen = [*sorted(tests | {AUDITED}), "-k", f"not test_mechanisms or {audits}"]
    tested = chosen if audits else sorted(tests)
    commands = [*lint, *([["pytest", *tested]] if tested else [])]
    print("changed:", *files, sep="\n  ")
    failed = []
    for command in commands:
        print("$", *command, flush=True)
        done = subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]], cwd=ROOT
        )
        # Exit status 5: pytest found no test, because all of them are of `make test-all`.
        if done.returncode not in (0, 5 if command[0] == "pytest" else 0):
            failed.append(" ".join(command))
    for command in failed:
        print(f"failed: {command}")
    return 1 if failed else 0


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.split("\n")[:-1]


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _importing(module: str) -> set[Path]:
    """Return the test modules that import ``module`` by its own name."""
    return {test for test, names in _imported_names().items() if module in names}


@cache
def _imported_names() -> dict[Path, set[str]]:
    """Return all names that each test module imports, with those of the modules that hold them."""
    imported = {}
    for test in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")):
        names = imported.setdefault(test.relative_to(ROOT), set())
        for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imported


if __name__ == "__main__":
    raise SystemExit(main())
