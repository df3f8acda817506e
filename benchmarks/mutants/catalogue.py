"""The catalogue of planted faults: modules, the tests of each, and faults that no test can find."""

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.faults import Fault, faults_of

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
TESTS_FILE = Path(__file__).parent / "tests.toml"


def read_tests() -> dict[str, tuple[str, ...]]:
    """Return the paths of each module's tests, below the folder of the tests."""
    content = tomllib.loads(TESTS_FILE.read_text(encoding="utf-8"))
    groups = content["groups"]

    def expanded(paths: Iterable[str]) -> Iterator[str]:
        for path in paths:
            if path.startswith("@"):
                yield from expanded(groups[path[1:]])
            else:
                yield path

    return {module: tuple(expanded(paths)) for module, paths in content["modules"].items()}


TESTS = read_tests()
"""The tests of each module below ``flower_ext`` in which faults are planted."""


@dataclass(frozen=True)
class Mutant:
    """A fault in a module."""

    module: str
    fault: Fault

    @property
    def line(self) -> int:
        """Line of the fault, from 1."""
        return source_of(self.module)[: self.fault.start].count(b"\n") + 1

    @property
    def change(self) -> tuple[str, str]:
        """The lines that differ, without and with the fault."""
        before = source_of(self.module)
        after = self.fault.planted(before)
        texts = before.decode().splitlines(), after.decode().splitlines()
        changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
        old = "\n".join(line[2:].strip() for line in changed if line[0] == "-")
        return old, "\n".join(line[2:].strip() for line in changed if line[0] == "+")


def all_mutants(modules: Iterable[str] = TESTS) -> list[Mutant]:
    """Return every fault that can be planted in these modules."""
    return [Mutant(module, fault) for module in modules for fault in faults_of(source_of(module))]


def source_of(module: str) -> bytes:
    """Return the source of a module below ``flower_ext``."""
    return (ROOT / "flower_ext" / module).read_bytes()


def reason_not_to_find(mutant: Mutant) -> str:
    """Return the reason that ``equivalent.toml`` gives for a fault; empty if it gives none."""
    for entry in read_equivalent():
        if entry["module"] == mutant.module and _matches(entry, *mutant.change):
            return entry["reason"]
    return ""


def stale_entries() -> list[dict[str, str]]:
    """Return the entries of ``equivalent.toml`` that match no fault, since their line changed."""
    changes: dict[str, list[tuple[str, str]]] = {module: [] for module in TESTS}
    for mutant in all_mutants():
        changes[mutant.module].append(mutant.change)
    return [
        entry
        for entry in read_equivalent()
        if not any(_matches(entry, *change) for change in changes[entry["module"]])
    ]


def read_equivalent() -> list[dict[str, str]]:
    """Return the entries of ``equivalent.toml``."""
    content = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    entries: list[dict[str, str]] = content["equivalent"]
    return entries


def _matches(entry: dict[str, str], old: str, new: str) -> bool:
    return entry["line"] == old and entry.get("instead", new) == new
