"""The demo: who learns from whom, its digits, and its three runs side by side."""

import gzip
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from flower_ext.data import load
from flower_ext.federation import run_in_process
from flower_ext.privacy import seeded_generator
from flower_ext.runs import RunDirectory, write_comparison
from flower_ext.training.models import build
from tests.support.apps import DEMO


def run(path, **overrides):
    server, client = DEMO.parts()
    config = {**DEMO.small_config(run_directory=str(path)), **overrides}
    run_in_process(server, client, num_clients=config["clients"], run_config=config)
    return RunDirectory.open(path)


def task(**overrides):
    """Return the app's functions on data, with the settings of a run."""
    module = DEMO.module("task")
    settings = DEMO.module("settings").Settings.of(DEMO.config(**overrides))
    return module, settings


def rows(images):
    return {tuple(row) for row in images.flatten(1).tolist()}


def test_sharing_pays_and_privacy_costs_little_of_it(tmp_path):
    """With 150 clients in place of 2,000, and a larger ε."""
    many = {"clients": 150, "rounds": 8, "evaluate-every": 8, "delta": 1e-4, "epsilon": 8.0}
    runs = [
        run(tmp_path / method, method=method, **many) for method in ("alone", "dp-fedavg", "fedavg")
    ]
    alone, private, shared = (each.metrics()[-1]["accuracy_mean"] for each in runs)
    assert alone < 0.65
    assert private > alone + 0.1
    assert shared > alone + 0.2
    epsilons = [[g.epsilon for g in each.guarantees()] for each in runs]
    assert epsilons[0] == epsilons[2] == []
    assert 7.9 < runs[1].guarantees()[1].epsilon <= 8.0
    page = write_comparison(runs, tmp_path / "all", title="Demo").read_text(encoding="utf-8")
    assert page.count("there are too few for all clients") == 1


def test_the_model_of_clients_that_train_alone_learns_from_nobody(tmp_path):
    run_ = run(tmp_path / "run", method="alone")
    first, last = (row["accuracy_mean"] for row in run_.metrics())
    assert first == pytest.approx(last, abs=0.05)  # new batches, and the same initial model
    model = load_file(run_.path / "model.safetensors")
    initial = build("digits-logistic")
    shapes = {name: tuple(value.shape) for name, value in initial.state_dict().items()}
    assert {name: value.shape for name, value in model.items()} == shapes
    longer = load_file(
        run(tmp_path / "longer", method="alone", rounds=3).path / "model.safetensors"
    )
    assert all((model[name] == longer[name]).all() for name in model)


def test_digits_for_testing_train_nobody_and_clients_hold_disjoint_digits():
    module, settings = task()
    clients = [module.client_data(settings, number) for number in range(5)]
    pool, tests = module.digits("digits", "", settings.seed)
    everything = load("digits")
    assert len(rows(pool.features) & rows(tests.features)) == 0
    assert rows(pool.features) | rows(tests.features) == rows(everything.features)
    assert all(len(client.train) == 27 and client.test is tests for client in clients)
    features = torch.cat([client.train.features for client in clients])
    assert len(rows(features)) == len(features)
    assert not rows(features) & rows(everything.features)


def test_a_digit_varies_a_little_and_stays_what_it_is():
    module, settings = task()
    pool, _ = module.digits("digits", "", settings.seed)
    images = pool.features[:500]
    varied = module.varied(images, seeded_generator(1, "varied"))
    assert varied.shape == images.shape
    assert varied.min() >= 0
    assert varied.max() <= 1
    distance = torch.cdist(varied.flatten(1), pool.features.flatten(1))
    nearest = pool.targets[distance.argmin(dim=1)]
    assert (nearest == pool.targets[:500]).float().mean() > 0.8
    still = module.varied(images, Still())
    assert torch.allclose(still, images, atol=1e-5)


class Still:
    """A generator that draws zeros only."""

    def uniform(self, low, high, shape):
        assert low == -high
        return np.zeros(shape)


def test_each_mnist_digit_has_one_client_and_too_many_are_refused(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    images = np.arange(120 * 784, dtype=np.uint64).reshape(120, 784) * 2654435761 >> 7
    for part, these in (("train", slice(0, 100)), ("t10k", slice(100, 120))):
        pixels = images[these].astype(np.uint8)
        labels = (np.arange(len(pixels)) % 10).astype(np.uint8)
        for name, head, array in (
            ("images-idx3", struct.pack(">HBB3I", 0, 8, 3, len(pixels), 28, 28), pixels),
            ("labels-idx1", struct.pack(">HBBI", 0, 8, 1, len(labels)), labels),
        ):
            with gzip.open(folder / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(head + array.tobytes())
    overrides = {"dataset": "mnist", "data_folder": str(tmp_path), "digits_per_client": 9}
    module, settings = task(clients=10, **overrides)
    clients = [module.client_data(settings, number) for number in range(10)]
    features = torch.cat([client.train.features for client in clients])
    assert len(rows(features)) == 90
    assert not rows(features) & rows(clients[0].test.features)
    module, settings = task(clients=11, **overrides)
    with pytest.raises(ValueError, match="digits-per-client=9 with clients=11: expected at most 9"):
        module.client_data(settings, 0)
