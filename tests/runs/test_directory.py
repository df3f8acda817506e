"""A run directory keeps what a run writes, and overwrites nothing."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from flower_ext.runs import NotARun, RunDirectory, RunWriter, new_run_path


@pytest.fixture
def run(tmp_path):
    return RunWriter.create(tmp_path / "deep" / "run", {"method": "m", "rounds": 2})


def test_a_new_run_knows_its_configuration_and_versions_and_is_running(run):
    assert run.config == {"method": "m", "rounds": 2}
    assert run.status == "running"
    assert {"python", "flwr", "torch", "flower-ext"} <= set(run.metadata["versions"])
    assert RunDirectory.open(run.path).metadata == run.metadata


def test_nothing_is_overwritten(run, tmp_path):
    with pytest.raises(NotARun, match="not empty"):
        RunWriter.create(run.path, {})
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(NotARun):
        RunWriter.create(file, {})
    assert file.read_text() == "precious"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(NotARun, match=r"no run\.json"):
        RunDirectory.open(tmp_path)


def test_metrics_are_kept_in_order_and_a_series_skips_rounds_without_it(run):
    run.log(1, loss=2.0)
    run.log(2, loss=1.0, accuracy=0.5)
    assert run.metrics() == [{"round": 1, "loss": 2.0}, {"round": 2, "loss": 1.0, "accuracy": 0.5}]
    assert run.metrics().series("accuracy") == ([2], [0.5])
    assert run.metrics().series("nothing") == ([], [])


def test_metrics_that_are_not_finite_are_refused(run):
    with pytest.raises(ValueError, match="loss=nan of round 3"):
        run.log(3, loss=float("nan"))


def test_models_of_tensors_and_arrays_are_saved_whole(run):
    run.save_model({"a": torch.arange(3.0)[::2], "b": np.ones((2, 2), np.float32)})
    saved = load_file(run.path / "model.safetensors")
    np.testing.assert_array_equal(saved["a"], [0.0, 2.0])
    np.testing.assert_array_equal(saved["b"], np.ones((2, 2)))
    assert {p.name for p in run.path.iterdir()} == {".lock", "model.safetensors", "run.json"}


def test_a_metric_that_a_client_lacks_is_an_empty_cell(run):
    rows = [{"partition": 0.0, "loss": 0.5}, {"partition": 1.0, "loss": 1.0, "auc": 0.25}]
    run.save_client_metrics(rows)
    assert run.client_metrics() == rows


def test_metrics_of_any_name_are_written_in_a_locale_of_ascii_alone(run):
    program = (
        "import locale, sys; assert locale.getencoding() != 'UTF-8'; from pathlib import Path; "
        "from flower_ext.runs import RunWriter as Run; run = Run.open(Path(sys.argv[1])); "
        "run.save_client_metrics([{'\\u03c3': 0.5}]); run.client_metrics()"
    )
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_alone}
    subprocess.run([sys.executable, "-c", program, run.path], env=environment, check=True)
    assert run.client_metrics() == [{"σ": 0.5}]


def test_client_metrics_come_back_as_numbers(run):
    run.save_client_metrics([{"partition": 0, "accuracy": 0.5}, {"partition": 1, "accuracy": 1.0}])
    assert run.client_metrics()[1] == {"partition": 1.0, "accuracy": 1.0}


def test_the_end_of_a_run_is_recorded_beside_what_was_known(run):
    run.finish("failed", "disk full", refused=2)
    facts = json.loads((run.path / "run.json").read_text())
    assert (facts["status"], facts["reason"]) == ("failed", "disk full")
    assert facts["summary"] == {"refused": 2}
    assert facts["config"] == run.config


def test_names_of_new_runs_never_collide(tmp_path):
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    first = new_run_path(tmp_path, "m", moment)
    assert first.name == "20260102-030405-m"
    first.mkdir()
    assert new_run_path(tmp_path, "m", moment) != first


def test_models_with_tied_weights_are_saved(run):
    tied = torch.ones(3)
    run.save_model({"a": tied, "b": tied})
    assert set(load_file(run.path / "model.safetensors")) == {"a", "b"}


def test_missing_answers_are_kept_and_a_torn_last_line_is_dropped(run):
    assert run.missing() == []
    run.log_missing(2, "train", [1, 3], ["round 2, node 7: the client failed"])
    with (run.path / "missing.jsonl").open("a") as stream:
        stream.write('{"round": 3, "ki')
    assert run.missing() == [
        {
            "round": 2,
            "kind": "train",
            "partitions": [1, 3],
            "refusals": ["round 2, node 7: the client failed"],
        }
    ]
