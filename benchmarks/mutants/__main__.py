"""Faults planted in what guarantees rest on: list those that the tests miss.

    python -m benchmarks mutants --seed 0 --number 300

Each fault is planted alone in a copy of the project, where the tests of its module run until the
first one fails. A fault that makes them run several times as long counts as found.
``equivalent.toml`` lists faults that no test can find, with reasons; entries whose line has changed
since are reported.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import os
import random
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from scipy import stats

from benchmarks.mutants.faults import Fault, faults_of

ROOT = Path(__file__).parents[2]
_OF_FAILURES = (
    "federation/client/test_upload.py",
    "federation/client/test_failing_clients.py",
)
_OF_PROTECTION = (
    "federation/test_protection.py",
    "federation/test_record_level_plan.py",
)
_OF_SUMS = (
    "privacy/mechanisms/test_noised_sum.py",
    "privacy/plans/test_release_plan.py",
    "federation/test_paths.py",
    "../plugins/audit/tests/test_noise.py",
)
_OF_ROUNDS = (
    "federation/test_paths.py",
    "federation/test_cohorts.py",
    "federation/test_strategy.py",
    "federation/test_spending.py",
    "federation/test_progress.py",
    "federation/test_stragglers.py",
)
_OF_MASKS = (
    "../plugins/audit/tests/test_secure_rounds.py",
    "federation/client/test_evaluating.py",
    "federation/sums/test_masked.py",
    "federation/test_evaluations.py",
)
_OF_RUNS = (
    "federation/test_frozen.py",
    "federation/test_strategy.py",
    "federation/test_client_level_mod.py",
    "federation/test_record_level_plan.py",
    "federation/test_odd_parameters.py",
    "federation/sums/test_masked.py",
    "federation/test_evaluations.py",
    *_OF_ROUNDS,
)
TESTS = {
    **{
        f"privacy/accounting/{module}.py": (
            "privacy/accounting/test_renyi.py",
            "privacy/accounting/test_accountant.py",
        )
        for module in ("accountant", "events", "gaussian", "pld", "renyi")
    },
    "privacy/mechanisms/bounds.py": ("privacy/mechanisms/test_bounds.py",),
    "privacy/mechanisms/updates.py": (
        "privacy/mechanisms/test_updates.py",
        "privacy/mechanisms/test_bounds.py",
    ),
    "privacy/mechanisms/noise.py": (
        "privacy/mechanisms/test_noise.py",
        "privacy/test_randomness.py",
    ),
    "privacy/accounting/sampling.py": ("privacy/accounting/test_sampling.py",),
    "privacy/mechanisms/noised_sum.py": _OF_SUMS,
    "privacy/mechanisms/quantization.py": (
        "privacy/mechanisms/test_quantization.py",
        "federation/test_paths.py",
    ),
    "privacy/mechanisms/secure_sum.py": ("privacy/mechanisms/test_secure_sum.py",),
    "privacy/queries/secure_scores.py": ("privacy/queries/test_secure_scores.py",),
    "privacy/mechanisms/discrete_gaussian.py": ("privacy/mechanisms/test_discrete_gaussian.py",),
    "training/trials/trainings.py": ("training/trials/test_trainings.py",),
    "training/dp/dp_sgd.py": (
        "training/trials/test_examples_in_turn.py",
        "training/trials/test_lone_examples.py",
        "training/dp/test_dp_sgd.py",
    ),
    "training/trials/examples_in_turn.py": (
        "training/trials/test_lone_examples.py",
        "training/trials/test_examples_in_turn.py",
        "training/dp/test_dp_sgd.py",
        "training/dp/test_tree_examples.py",
    ),
    "training/trials/examples_together.py": (
        "training/trials/test_examples_together.py",
        "training/dp/test_dp_sgd.py",
        "training/dp/test_tree_examples.py",
    ),
    "training/trials/made_up_examples.py": (
        "training/trials/test_examples_together.py",
        "training/trials/test_examples_in_turn.py",
        "training/trials/test_trainings.py",
    ),
    "training/isolation.py": ("training/test_isolation.py",),
    "training/trials/snapshots.py": (
        "training/trials/test_snapshots.py",
        "training/trials/test_trainings.py",
    ),
    "secure/weighting/encoding.py": ("secure/weighting/test_encoding.py",),
    "federation/protection.py": _OF_PROTECTION,
    "federation/client/upload.py": (*_OF_PROTECTION, *_OF_FAILURES),
    "federation/client/evaluating.py": _OF_MASKS,
    "federation/client/preparing.py": (*_OF_PROTECTION, *_OF_FAILURES),
    "federation/population.py": ("federation/test_population.py", "federation/test_cohorts.py"),
    "federation/connection.py": _OF_RUNS,
    "federation/exchange.py": ("federation/test_exchange.py", "federation/test_hostile.py"),
    "federation/replies.py": ("federation/test_records.py", "federation/test_hostile.py"),
    "federation/round.py": ("federation/test_round.py", *_OF_RUNS),
    "federation/run.py": ("federation/test_resume.py", "federation/test_spending.py", *_OF_RUNS),
    "federation/spending.py": ("federation/test_spending.py", *_OF_RUNS),
    "federation/claims.py": (
        "federation/test_spending.py",
        "privacy/test_shared_ledger.py",
        *_OF_RUNS,
    ),
    "federation/query_round.py": ("federation/test_query_round.py", *_OF_MASKS),
    "federation/strategy.py": _OF_RUNS,
    "federation/sums/masked.py": _OF_MASKS,
    "federation/sums/masked_member.py": _OF_MASKS,
    "federation/sums/summation.py": (
        "federation/test_round.py",
        "federation/test_hostile.py",
        "federation/test_records_uploads.py",
        *_OF_ROUNDS,
    ),
    "federation/records.py": (
        "federation/test_records.py",
        "federation/test_records_uploads.py",
        "federation/test_paths.py",
    ),
    "secure/pair_keys.py": ("secure/test_pair_keys.py",),
    "secure/aggregation/context.py": ("secure/aggregation",),
    "secure/aggregation/mask_streams.py": ("secure/aggregation",),
    "secure/aggregation/member.py": ("secure/aggregation",),
    "secure/aggregation/aggregation_messages.py": ("secure/aggregation",),
    "secure/messages.py": ("secure",),
    "json_record.py": ("test_json_record.py", "secure"),
    "secure/aggregation/aggregation_server.py": ("secure/aggregation",),
    "secure/aggregation/shamir.py": ("secure/aggregation",),
}
_COPIED = (
    *("flower_ext", "tests", "apps", "benchmarks", "docs", "pyproject.toml"),
    *("plugins/audit", "plugins/conftest.py"),
)
_SLOW_TO_IMPORT = ("torch", "flwr.serverapp", "flwr.clientapp", "dp_accounting.pld", "opacus")
_EQUIVALENT = Path(__file__).parent / "equivalent.toml"
_LEFT_OUT = "not independent_accountant"
"""Tests that take most of a minute each; without them the share found is slightly low."""
_PATIENCE = 4.0
"""Multiple of the tests' usual time after which a fault counts as found."""


@dataclass(frozen=True)
class Mutant:
    """A fault in a module."""

    module: str
    fault: Fault

    @property
    def line(self) -> int:
        """Line of the fault, from 1."""
        return _source(self.module)[: self.fault.start].count(b"\n") + 1

    @property
    def change(self) -> tuple[str, str]:
        """The lines that differ, without and with the fault."""
        before = _source(self.module)
        after = self.fault.planted(before)
        texts = before.decode().splitlines(), after.decode().splitlines()
        changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
        old = "\n".join(line[2:].strip() for line in changed if line[0] == "-")
        return old, "\n".join(line[2:].strip() for line in changed if line[0] == "+")


def main() -> None:
    """Plant faults, run tests, and print the share that was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--number", type=int, default=300, help="faults, over all modules")
    parser.add_argument("--module", choices=TESTS, action="append", help="only this; repeatable")
    asked = parser.parse_args()
    everything = [
        Mutant(module, fault)
        for module in asked.module or TESTS
        for fault in faults_of(_source(module))
    ]
    number = min(asked.number, len(everything))
    sample = random.Random(asked.seed).sample(everything, number)
    sample.sort(key=lambda mutant: (mutant.module, mutant.fault.start))
    print(f"{number} of {len(everything)} faults, seed {asked.seed}", flush=True)
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    with TemporaryDirectory() as temporary:
        folder = _copy(Path(temporary))
        missed = _missed(folder, sample)
    reasons = {mutant: _why_none_can_find(mutant) for mutant in missed}
    for mutant, reason in reasons.items():
        old, new = mutant.change
        where = f"flower_ext/{mutant.module}:{mutant.line}"
        print(f"\n{where}: {reason or 'NOT FOUND'}\n- {old}\n+ {new}")
    found = number - len(missed)
    print(f"\nfound: {_share(found, number)}")
    if any(reasons.values()):
        could = found + list(reasons.values()).count("")
        print(f"of those that can be found: {_share(found, could)}")
    for entry in stale_entries():
        print(
            f"{_EQUIVALENT.name} is stale: {entry['module']} has no such fault in {entry['line']}"
        )


def stale_entries() -> list[dict[str, str]]:
    """Return the entries of ``equivalent.toml`` that match no fault, since their line changed."""
    changes = {
        module: [Mutant(module, fault).change for fault in faults_of(_source(module))]
        for module in TESTS
    }
    return [
        entry
        for entry in _equivalent()
        if not any(_matches(entry, *change) for change in changes[entry["module"]])
    ]


def _missed(folder: Path, sample: Iterable[Mutant]) -> list[Mutant]:
    """Return the faults with which the tests pass."""
    missed, patience = [], {}
    for count, mutant in enumerate(sample, 1):
        module = mutant.module
        if module not in patience:
            started = time.monotonic()
            if not _passes(folder, module, timeout=None):
                raise SystemExit(f"the tests of {module} fail without any fault: fix them first")
            patience[module] = 20 + _PATIENCE * (time.monotonic() - started)
        target = folder / "flower_ext" / module
        target.write_bytes(mutant.fault.planted(_source(module)))
        try:
            passed = _passes(folder, module, timeout=patience[module])
        finally:
            target.write_bytes(_source(module))
        if passed:
            missed.append(mutant)
        said = "MISSED" if passed else "found"
        print(f"{count}: {said} {module}:{mutant.line}", flush=True)
    return missed


def _passes(folder: Path, module: str, *, timeout: float | None) -> bool:
    """Run tests in a child of this process, which has already imported the slow modules."""
    if (child := os.fork()) == 0:
        os.setsid()
        os._exit(_tested(folder, [f"tests/{name}" for name in TESTS[module]]))
    ends = time.monotonic() + (math.inf if timeout is None else timeout)
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _tested(folder: Path, tests: list[str]) -> int:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", _LEFT_OUT]
    return int(pytest.main([*arguments, *tests]))


def _copy(folder: Path) -> Path:
    """Copy the project."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _source(module: str) -> bytes:
    return (ROOT / "flower_ext" / module).read_bytes()


def _why_none_can_find(mutant: Mutant) -> str:
    """Return the reason that ``equivalent.toml`` gives; empty if it gives none."""
    for entry in _equivalent():
        if entry["module"] == mutant.module and _matches(entry, *mutant.change):
            return entry["reason"]
    return ""


def _equivalent() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = tomllib.loads(_EQUIVALENT.read_text(encoding="utf-8"))[
        "equivalent"
    ]
    return entries


def _matches(entry: dict[str, str], old: str, new: str) -> bool:
    return entry["line"] == old and entry.get("instead", new) == new


def _share(found: int, number: int) -> str:
    """Return a share with its Clopper–Pearson interval at 95 %."""
    interval = stats.binomtest(found, number).proportion_ci(method="exact")
    share = found / number
    return f"{found} of {number}, {share:.0%} (95 %: {interval.low:.0%} to {interval.high:.0%})"


if __name__ == "__main__":
    main()
