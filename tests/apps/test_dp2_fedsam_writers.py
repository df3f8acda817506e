"""FEMNIST by writer: clients are writers, the file comes from rows, and misfits are refused."""

from importlib import import_module

import numpy as np
import pytest

from flower_ext.data import DataNotFound
from flower_ext.errors import InvalidValue
from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting
from tests.support.apps import DP2_FEDSAM

DP2_FEDSAM.parts()
writers = import_module("dp2_fedsam_app.writers")


def rows(counts):
    """Return rows as flwr-datasets has them; the pixel of an image names its writer."""
    return [
        {"image": np.full((28, 28), number), "character": at % 62, "writer_id": f"f{number:02}"}
        for number, count in enumerate(counts)
        for at in range(count)
    ]


def test_each_client_has_the_images_of_one_writer(tmp_path):
    writers.save_writers(rows([12, 30, 9, 25]), tmp_path / writers.FILE)
    examples, names = writers.load_writers(tmp_path)
    shares = writers.by_writer(names, 3, np.random.default_rng(0))
    pixels = [set((255 * examples.features[share]).round().unique().tolist()) for share in shares]
    assert sorted(len(share) for share in shares) == [12, 25, 30]
    assert sorted(map(tuple, pixels)) == [(0.0,), (1.0,), (3.0,)]
    with pytest.raises(InvalidValue, match="clients=4: expected at most 3"):
        writers.by_writer(names, 4, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"writer": None}, "lacks writer"),
        ({"y": np.array([62])}, "labels y from 0 to 61"),
        ({"y": np.array([1, 2])}, "for each of 1 images"),
        ({"x": np.zeros((1, 8, 8), np.uint8)}, r"expected bytes \(n, 28, 28\)"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, change, error):
    whole = {"x": np.zeros((1, 28, 28), np.uint8), "y": np.array([0]), "writer": np.array([0])}
    arrays = {name: array for name, array in {**whole, **change}.items() if array is not None}
    np.savez(tmp_path / writers.FILE, **arrays)
    with pytest.raises(InvalidValue, match=error):
        writers.load_writers(tmp_path)


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(DataNotFound, match="save_writers"):
        writers.load_writers(tmp_path / "empty")


def start(tmp_path, **changes):
    server, client = DP2_FEDSAM.parts()
    settings = {"clients": 3, "rounds": 1, "sampling_rate": 1.0, "model": "mnist-mlp", **changes}
    config = DP2_FEDSAM.config(
        run_directory=str(tmp_path / "run"), data_folder=str(tmp_path), **settings
    )
    run_in_process(server, client, num_clients=3, run_config=config)
    return RunDirectory.open(tmp_path / "run")


def test_a_run_trains_on_writers(tmp_path):
    writers.save_writers(rows([20, 30, 40]), tmp_path / writers.FILE)
    run = start(tmp_path, dataset="femnist-writers", partition="by-writer")
    assert run.status == "completed"
    assert len(run.client_metrics()) == 3


@pytest.mark.parametrize(
    "changes",
    [{"dataset": "femnist-writers", "partition": "iid"}, {"partition": "by-writer"}],
    ids=["writers dealt out", "no writers"],
)
def test_data_and_partition_that_do_not_fit_are_refused(tmp_path, changes):
    with pytest.raises(UnfitSetting, match="partition"):
        start(tmp_path, **changes)
