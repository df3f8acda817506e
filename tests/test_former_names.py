"""Former names keep working for one release, with a warning."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flower_ext import planning, privacy, secure, training
from flower_ext.algorithms import ditto, upcycled

ROOT = Path(__file__).parents[1]
FORMER = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from flower_ext.reporting import RunDirectory
    from flower_ext.reporting.settings import integer
from flower_ext import runs
assert RunDirectory is runs.RunDirectory
assert integer is runs.settings.integer
print(*(w.message for w in seen if w.category is DeprecationWarning))
"""


def test_reporting_is_runs_and_says_so_once():
    done = subprocess.run(
        [sys.executable, "-c", FORMER], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("to flower_ext.runs;") == 1


def test_dp_ditto_is_in_ditto_and_says_so():
    sys.modules.pop("flower_ext.algorithms.dp_ditto", None)  # a module warns when it is imported
    with pytest.warns(DeprecationWarning, match=r"flower_ext\.algorithms\.ditto now") as seen:
        former = import_module("flower_ext.algorithms.dp_ditto")
    assert len(seen) == 1
    for name in former.__all__:
        assert getattr(former, name) is getattr(import_module(f"{ditto.__name__}.dp_ditto"), name)


@pytest.mark.parametrize(
    ("room", "name", "now"),
    [
        (planning, "TrainingPlan", "planning.Schedule"),
        (planning, "EmpiricalPlan", "planning.EmpiricalSchedule"),
        (training, "pilot_run", "algorithms.ditto.pilot_run"),
        (upcycled, "Schedule", "algorithms.upcycled.Coefficient"),
        (secure, "WeightingPlan", "secure.weighting.agreement.WeightingSettings"),
        *((privacy, name, now[len("flower_ext.") :]) for name, now in privacy._MOVED.items()),
    ],
)
def test_a_name_that_moved_is_found_by_the_former_one_with_a_warning(room, name, now):
    now = f"flower_ext.{now}"
    with pytest.warns(
        DeprecationWarning, match=rf"\.{name} has moved to {re.escape(now)};"
    ) as seen:
        former = getattr(room, name)
    module, _, last = now.rpartition(".")
    assert former is getattr(import_module(module), last)
    assert seen[0].filename == __file__
    assert name not in room.__all__
    with pytest.raises(AttributeError, match="no attribute 'Plans'"):
        _ = room.Plans


def test_privacy_keeps_few_names_and_knows_no_others():
    assert len(privacy.__all__) <= 45
    assert not set(privacy.__all__) & set(privacy._MOVED)
    with pytest.raises(AttributeError, match="no attribute 'epsilon_texts'"):
        _ = privacy.epsilon_texts


def test_nothing_here_imports_a_name_from_where_it_was():
    used = {}
    for folder in ("flower_ext", "apps", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "flower_ext.privacy":
                    used |= {alias.name: path for alias in node.names}
    assert {name: path for name, path in used.items() if name in privacy._MOVED} == {}
