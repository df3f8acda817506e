"""Names that moved go on working for one release, with a warning."""

import subprocess
import sys

import pytest

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
    assert done.stdout.count("flower_ext.runs now") == 1


def test_the_settings_of_a_weighting_are_still_found_as_its_plan():
    from flower_ext import secure

    with pytest.warns(DeprecationWarning, match="WeightingSettings now"):
        former = secure.WeightingPlan
    assert former is secure.WeightingSettings
