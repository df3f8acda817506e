"""The tests and audits that ``make quick`` runs for a change."""

from pathlib import Path

import pytest

from tests.support.quick import chosen_audits, chosen_tests


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("flower_ext/privacy/mechanisms/noise.py", "tests/privacy/mechanisms/test_noise.py"),
        ("flower_ext/algorithms/uldp/averaging.py", "tests/algorithms/uldp/test_methods.py"),
        ("flower_ext/training/dp/dp_sgd.py", "tests/training/dp/test_dp_sgd.py"),
        ("tests/privacy/mechanisms/test_noise.py", "tests/privacy/mechanisms/test_noise.py"),
        ("tests/support/planted_faults.py", "plugins/audit/tests/test_mechanisms.py"),
        ("plugins/kernels/flower_ext_kernels/dense.py", "plugins/kernels/tests/test_dense.py"),
        ("plugins/kernels/flower_ext_kernels/sgd.py", "plugins/kernels/tests"),
        ("flower_ext/privacy/__init__.py", "tests/docs/test_site.py"),
        ("flower_ext/privacy/__init__.py", "tests/privacy/test_ledger.py"),
    ],
)
def test_a_change_is_tested_by_what_has_its_name_or_imports_it(changed, tests):
    assert Path(tests) in chosen_tests(Path(changed))


def test_a_module_that_no_test_names_is_tested_by_its_folder():
    tests = chosen_tests(Path("flower_ext/federation/server/connection.py"))
    assert tests == {Path("tests/federation/server")}


@pytest.mark.parametrize(
    ("changed", "audits"),
    [
        ("flower_ext/algorithms/uldp/averaging.py", "uldp"),
        ("flower_ext/algorithms/dp_ditto.py", "ditto"),
        ("flower_ext/privacy/mechanisms/noise.py", "client-noise or uldp-avg or ditto"),
        ("plugins/audit/flower_ext_audit/harness.py", "client-noise or uldp-avg or ditto"),
        ("flower_ext/runs/figures.py", ""),
        ("tests/privacy/mechanisms/test_noise.py", ""),
    ],
)
def test_a_change_is_audited_by_the_mechanisms_that_execute_it(changed, audits):
    assert chosen_audits([Path(changed)]) == audits
