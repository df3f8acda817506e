"""Run the tests of a module with a fault planted in it, in a copy of the project."""

import importlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.mutants.catalogue import ROOT, TESTS, Mutant, source_of

_COPIED = (
    *("flower_ext", "tests", "apps", "benchmarks", "docs", "pyproject.toml"),
    *("plugins/audit", "plugins/conftest.py"),
)
_SLOW_TO_IMPORT = ("torch", "flwr.serverapp", "flwr.clientapp", "dp_accounting.pld", "opacus")
_LEFT_OUT = "not independent_accountant"
"""Tests that take most of a minute each; without them the share found is slightly low."""
_PATIENCE = 4.0
"""Multiple of the tests' usual time after which a fault counts as found."""
_LEAST_PATIENCE = 20.0
"""Seconds added to that time, because other work may slow the tests of a small module down."""


def missed_mutants(sample: Iterable[Mutant]) -> list[Mutant]:
    """Return the faults with which the tests of their module pass."""
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    missed: list[Mutant] = []
    patience: dict[str, float] = {}
    with TemporaryDirectory() as temporary:
        folder = _copy_project(Path(temporary))
        for count, mutant in enumerate(sample, 1):
            module = mutant.module
            if module not in patience:
                started = time.monotonic()
                if not _passes(folder, module, timeout=None):
                    raise SystemExit(
                        f"the tests of {module} fail without any fault: fix them first"
                    )
                patience[module] = _LEAST_PATIENCE + _PATIENCE * (time.monotonic() - started)
            passed = _passes_with(folder, mutant, timeout=patience[module])
            if passed:
                missed.append(mutant)
            outcome = "MISSED" if passed else "found"
            print(f"{count}: {outcome} {module}:{mutant.line}", flush=True)
    return missed


def _passes_with(folder: Path, mutant: Mutant, *, timeout: float) -> bool:
    """Plant a fault in the copy, run the tests of its module, and remove the fault."""
    source, target = source_of(mutant.module), folder / "flower_ext" / mutant.module
    target.write_bytes(mutant.fault.planted(source))
    try:
        return _passes(folder, mutant.module, timeout=timeout)
    finally:
        target.write_bytes(source)


def _passes(folder: Path, module: str, *, timeout: float | None) -> bool:
    """Run tests in a child of this process, which has already imported the slow modules."""
    if (child := os.fork()) == 0:
        os.setsid()
        os._exit(_run_tests(folder, [f"tests/{name}" for name in TESTS[module]]))
    ends = time.monotonic() + (math.inf if timeout is None else timeout)
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run_tests(folder: Path, tests: list[str]) -> int:
    """Run tests of the copy in this process, silently, and return pytest's exit status."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = True
    # A package that is already imported would lead all imports below it to the unchanged code.
    for name in [name for name in sys.modules if _is_of_project(name)]:
        del sys.modules[name]
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", _LEFT_OUT]
    return int(pytest.main([*arguments, *tests]))


def _is_of_project(module: str) -> bool:
    """Return True for modules of benchmarks, of the package and of its plug-ins."""
    package = module.partition(".")[0]
    return package in ("benchmarks", "flower_ext") or package.startswith("flower_ext_")


def _copy_project(folder: Path) -> Path:
    """Copy what the tests need into a folder, and return the folder."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(source, folder / name)
    return folder
