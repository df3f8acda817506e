"""The devices of each data set of Upcycled-FL, from files or generated."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flower_ext.data import DataNotFound
from flower_ext.training.models import build
from tests.support.apps import UPCYCLED_FL
from tests.support.real_data import REAL

devices_, synthetic = UPCYCLED_FL.module("devices"), UPCYCLED_FL.module("synthetic")
describe_devices, load_devices = devices_.describe_devices, devices_.load_devices
device_names = devices_.device_names

pytestmark = pytest.mark.usefixtures("offline")

SYNTHETIC = [name for name in device_names() if name.startswith("synthetic")]
LETTERS = Path("nist_vowels10") / "nist_vowels10_28x28.npz"


def authors_file(folder: Path, kind: str, count: int = 3) -> None:
    """Return a file in which every feature of device k is k."""
    path = folder / synthetic.file_name(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {}
    for part, size in (("train", 9), ("test", 1)):
        device = np.repeat(np.arange(count), size)
        content |= {
            f"x_{part}": np.tile(device[:, None], 20).astype(float),
            f"y_{part}": (np.arange(len(device)) % 2).astype(np.uint8),
            f"client_{part}": device,
        }
    np.savez(path, **content)


def letters_file(folder: Path, count: int = 600) -> None:
    (folder / LETTERS).parent.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    np.savez(folder / LETTERS, x=images, y=labels, classes=np.array(list("aeiouAEIOU")))


def equal(one, two) -> bool:
    """Return True if two lists of devices hold the same examples."""
    return len(one) == len(two) and all(
        torch.equal(a.train.features, b.train.features)
        and torch.equal(a.test.targets, b.test.targets)
        for a, b in zip(one, two, strict=True)
    )


def test_the_names_are_those_of_the_paper():
    assert device_names() == [
        *("synthetic-iid", "synthetic-0-0", "synthetic-0.5-0.5", "synthetic-1-1"),
        "letters",
    ]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_without_files_devices_are_generated_from_the_seed(name, tmp_path):
    info = describe_devices(name, tmp_path)
    assert (info.num_classes, info.num_devices, info.feature_shape) == (10, 30, (20,))
    assert "generated" in info.source
    first, again, other = (load_devices(name, tmp_path, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 30
    assert equal(first, again)
    assert not equal(first, other)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_authors_files_are_taken_where_they_are_unless_asked_otherwise(name, tmp_path):
    authors_file(tmp_path, name.removeprefix("synthetic-"))
    info = describe_devices(name, tmp_path)
    assert info.source == "the authors' data"
    assert info.num_classes == 2
    for number, data in enumerate(load_devices(name, tmp_path, num_devices=2)):
        assert set(data.train.features.flatten().tolist()) == {number}
    forced = load_devices(name, tmp_path, generated=True)
    assert equal(forced, load_devices(name))
    assert "generated" in describe_devices(name, tmp_path, generated=True).source
    assert describe_devices(name, tmp_path, generated=True, num_classes=4).num_classes == 4


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    authors_file(tmp_path, "iid")
    monkeypatch.setenv("FLOWER_EXT_DATA", str(tmp_path))
    assert len(load_devices("synthetic-iid", num_devices=3)) == 3
    assert "authors" in describe_devices("synthetic-iid").source


def test_generated_devices_may_be_fewer_and_binary():
    devices = load_devices("synthetic-1-1", num_devices=4, num_classes=2)
    assert len(devices) == 4
    assert {label for data in devices for label in data.train.targets.tolist()} == {0, 1}


def test_letters_are_fifty_devices_of_five_classes_with_a_tenth_for_testing(tmp_path):
    letters_file(tmp_path, 1_000)
    devices = load_devices("letters", tmp_path)
    assert len(devices) == 50
    for data in devices:
        together = torch.cat([data.train.targets, data.test.targets])
        assert len(together.unique()) == 5
        assert len(data.train) == round(0.9 * len(together))
        assert data.train.features.shape[1:] == describe_devices("letters").feature_shape
    assert sum(len(data.train) + len(data.test) for data in devices) == 1_000
    assert equal(devices, load_devices("letters", tmp_path, seed=1))
    assert not equal(devices, load_devices("letters", tmp_path, seed=2))


def test_a_report_calls_the_letters_a_stand_in():
    assert "stand-in" in describe_devices("letters").source


def test_letters_that_are_nowhere_to_be_found_say_so(tmp_path):
    with pytest.raises(DataNotFound, match=f"data-folder='{tmp_path}': expected .* 'letters'"):
        load_devices("letters", tmp_path)


@pytest.mark.parametrize("name", device_names())
def test_the_default_model_takes_the_features_and_tells_the_classes_apart(name):
    info = describe_devices(name)
    shape = (2, *info.feature_shape)
    assert build(info.model, num_classes=info.num_classes)(torch.ones(shape)).shape == (
        2,
        info.num_classes,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "synthetic-2-2"}, "name='synthetic-2-2': expected one of synthetic-iid,"),
        ({"name": "synthetic-iid", "num_devices": 0}, "num_devices=0: expected an integer >= 1"),
        ({"name": "synthetic-iid", "num_devices": 4}, "expected at most 3.*generated=True"),
        ({"name": "synthetic-iid", "num_classes": 10}, "expected 2.*authors.*generated=True"),
        ({"name": "synthetic-0-0", "num_classes": 1}, "num_classes=1: expected at least 2"),
        ({"name": "synthetic-0-0", "num_classes": 0}, "num_classes=0: expected at least 2"),
        ({"name": "letters", "num_classes": 5}, "num_classes=5: expected 10"),
        ({"name": "letters", "generated": True}, "generated=True: expected False"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message, tmp_path):
    authors_file(tmp_path, "iid")
    with pytest.raises(ValueError, match=message):
        load_devices(folder=tmp_path, **arguments)


@pytest.mark.skipif(not (REAL / LETTERS).is_file(), reason="needs the real letters")
def test_the_real_letters_are_ten_thousand_in_equal_shares():
    devices = load_devices("letters", REAL)
    assert {len(data.train) + len(data.test) for data in devices} == {200}


@pytest.mark.skipif(
    not (REAL / synthetic.file_name("iid")).is_file(), reason="needs the authors' files"
)
@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_authors_devices_are_thirty(name):
    devices = load_devices(name, REAL)
    assert len(devices) == describe_devices(name, REAL).num_devices == 30
