"""Runs that version 0.1.0 began, before its rooms moved, resume: checkpoints, ledgers and memory.

``former_runs.zip`` holds runs of `play` that died after round 3 of 5 had begun.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_ext.algorithms import DP2FedSAM, Scaffold
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan
from flower_ext.runs import RunDirectory
from tests.support.dying_runs import CLIENTS, play

FORMER = Path(__file__).with_name("former_runs.zip")
METHODS = {
    "dp2-fedsam": {"strategy": DP2FedSAM},
    "scaffold": {
        "strategy": Scaffold,
        "plan": NonPrivatePlan(sampling=FixedSizeSampling(CLIENTS, 2)),
        "ledger": False,
        "seeded_noise": False,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_an_older_version_began_goes_on_as_if_it_had_not_stopped(method, tmp_path):
    shutil.unpack_archive(FORMER, tmp_path)
    began = RunDirectory.open(tmp_path / method / "run")
    spent = began.ledger()
    parts, _ = play(tmp_path / method, **METHODS[method])
    whole, _ = play(tmp_path / "whole", **METHODS[method])
    assert len(parts.metrics()) == len(whole.metrics()) == 5
    assert parts.ledger()[: len(spent)] == spent
    assert parts.guarantees() == whole.guarantees()
    assert [row["answered"] for row in parts.metrics()] == [r["answered"] for r in whole.metrics()]
    models = [load_file(run.path / "model.safetensors") for run in (parts, whole)]
    for name, array in models[0].items():  # other processors round differently
        np.testing.assert_allclose(array, models[1][name], rtol=1e-4, atol=1e-5)
