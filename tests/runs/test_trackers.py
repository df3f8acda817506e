"""Trackers with the real libraries, offline; the tests read back their files."""

import importlib.util
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory, trackers
from flower_ext.runs.callbacks import Callbacks
from flower_ext.runs.trackers import TRACKERS, callbacks_of
from tests.support.apps import OWN
from tests.support.recorded_runs import play

SEEDED = {"seed": 1, "seeded_noise": True}


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def interrupted(path: Path, tracker: str) -> RunDirectory:
    """Run so that round three is played twice, because the run dies before its checkpoint."""
    play(path, dies_in=3, callbacks=[tracker], **SEEDED)
    return play(path, callbacks=[tracker], **SEEDED)[0]


def expected(run: RunDirectory, name: str) -> list[tuple[int, float]]:
    return [(int(number), value) for number, value in zip(*run.series(name), strict=True)]


@needs("tensorboard")
def test_tensorboard_reads_every_number_of_every_round_of_a_run_that_was_resumed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = interrupted(tmp_path / "run", "tensorboard")
    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    names = {name for row in run.metrics() for name in row} - {"round"}
    assert set(found.Tags()["scalars"]) == names >= {"accuracy_mean", "epsilon_provable", "delta"}
    for name in ("accuracy_mean", "epsilon_provable", "delta", "bytes_up"):
        points = [(event.step, event.value) for event in found.Scalars(name)]
        assert points == [(r, pytest.approx(value)) for r, value in expected(run, name)]
    texts = {tag: _text(found, tag) for tag in found.Tags()["tensors"]}
    assert "| clipping-norm | 0.5 |" in texts["settings/text_summary"]
    outcome = texts["outcome/text_summary"]
    assert outcome.startswith("completed")
    assert all(guarantee.statement() in outcome for guarantee in run.guarantees())


@needs("tensorboard")
def test_scores_that_a_resumed_run_adds_to_its_last_round_hide_nothing_of_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.create(tmp_path / "run", {})
    for resumed, row in [(False, {"cohort": 3.0}), (True, {"accuracy_mean": 0.5})]:
        run.resumed = resumed
        (tracker,) = callbacks_of(["tensorboard"])
        tracker.round(run, 1, row)
        tracker.end(run)
    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [found.Scalars(name)[0].value for name in ("cohort", "accuracy_mean")] == [3.0, 0.5]
    run.close()


def _text(found, tag: str) -> str:
    return found.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


@needs("mlflow")
@pytest.mark.report
def test_mlflow_reads_one_run_with_settings_metrics_and_report_after_a_resume(tmp_path):
    from mlflow import MlflowClient

    run = interrupted(tmp_path / "run", "mlflow")
    client = MlflowClient(f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'flower_ext'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params == {name: str(value) for name, value in run.config.items()}
    for name in ("accuracy_mean", "epsilon_provable", "bytes_up"):
        history = client.get_metric_history(found.info.run_id, name)
        points = {point.step: point.value for point in sorted(history, key=lambda p: p.timestamp)}
        assert sorted(points.items()) == expected(run, name)
    artifacts = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert artifacts == {"guarantee.json", "outcome.md", "report.html"}


@needs("mlflow")
def test_mlflow_goes_where_its_variables_say(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'all.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    MlflowClient(uri).create_experiment("ours", artifact_location=(tmp_path / "files").as_uri())
    runs = [play(tmp_path / name, rounds=1, callbacks=["mlflow"])[0] for name in ("a", "b")]
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ours")
    found = client.search_runs([experiment.experiment_id])
    assert {each.info.run_name for each in found} == {"a", "b"}
    assert not any((run.path / "mlflow").exists() for run in runs)


@needs("wandb")
@pytest.mark.report
def test_wandb_keeps_one_run_offline_with_settings_history_and_report(tmp_path):
    import wandb

    run = interrupted(tmp_path / "run", "wandb")
    wandb.teardown()  # its service may still be writing
    first, second = sorted((run.path / "wandb").glob(f"offline-run-*-{run.id}"))
    history: dict[int, dict[str, str]] = {}
    for start in (first, second):
        for record in _wandb_records(next(start.glob("*.wandb"))):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert (record.run.run_id, record.run.project) == (run.id, "flower_ext")
                settings = {one.key: one.value_json for one in record.run.config.update}
                assert settings["clipping-norm"] == "0.5"
            if kind == "history":
                row = {item.nested_key[0]: item.value_json for item in record.history.item}
                history[int(row["round"])] = row
    for name in ("accuracy_mean", "epsilon_provable", "bytes_up"):
        points = [(number, float(history[number][name])) for number in sorted(history)]
        assert points == expected(run, name)
    assert {path.name for path in (second / "files").iterdir()} >= {"guarantee.json", "report.html"}


def _wandb_records(file: Path) -> Iterator:
    """Return W&B's records, framed as in LevelDB's log, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = file.read_bytes(), 7, []
    assert content.startswith(b":W&B")
    while position + 7 <= len(content):
        if (left := -position % 2**15) < 7 and left:  # the end of a block
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(b"".join(parts))
            parts = []


@pytest.mark.parametrize("tracker", [pytest.param(name, marks=needs(name)) for name in TRACKERS])
def test_a_failed_run_is_a_failed_one_there_and_only_its_user_reads_it(tracker, tmp_path):
    run, *_ = play(tmp_path / "run", dies_in=2, callbacks=[tracker])
    assert run.facts["status"] == "failed"
    assert (run.path / tracker).stat().st_mode & 0o077 == 0
    if tracker == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("flower_ext")
        (found,) = client.search_runs([experiment.experiment_id])
        assert found.info.status == "FAILED"


@needs("mlflow")
@needs("tensorboard")
def test_a_setting_of_an_app_names_trackers_and_does_not_hinder_its_resuming(tmp_path):
    server, client = OWN.parts()
    config = {**OWN.config(), "run-directory": str(tmp_path / "run"), "resume": True}
    for extra in ({"trackers": "tensorboard, mlflow"}, {"trackers": ""}):
        run_in_process(
            server, client, num_clients=config["clients"], run_config={**config, **extra}
        )
    run = RunDirectory.open(tmp_path / "run")
    assert len(run.facts["starts"]) == 2
    assert (run.path / "tensorboard").is_dir()
    assert (run.path / "mlflow" / "mlflow.db").is_file()


def test_an_unknown_tracker_is_refused_before_there_is_a_directory(tmp_path):
    with pytest.raises(InvalidValue, match="trackers='mlfow': expected some of tensorboard, ml"):
        play(tmp_path / "run", callbacks=["mlfow"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_without_its_library_names_the_extra_before_the_first_round(
    name, tmp_path, monkeypatch
):
    module = trackers.TENSORBOARD if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidValue, match=re.escape(f"pip install 'flower-ext[{name}]'")) as said:
        play(tmp_path / "run", callbacks=[name])
    assert "\n" not in str(said.value)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_write_does_not_end_a_run(tmp_path):
    (tracker,) = (
        callbacks_of(["tensorboard"]) if importlib.util.find_spec("tensorboard") else [None]
    )
    if tracker is None:
        pytest.skip("tensorboard is not installed")
    run = RunDirectory.create(tmp_path / "run", {})
    (run.path / "tensorboard").write_text("a file where the folder should be")
    following = Callbacks([tracker])
    following.begin(run)
    following.round(run, 1, {"loss": 1.0})
    run.finish("completed")
    following.end(run)
    run.close()
