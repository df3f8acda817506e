"""Data sets are found, read bit for bit and scaled; missing and broken files are named."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from flower_ext.data import DataNotFound, describe, load, names
from tests.support.grids import grid
from tests.support.real_data import REAL


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as stream:
        stream.write(header + array.tobytes())


def small_mnist(folder: Path, suffix: str = ".gz") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, 30).astype(np.uint8)
    for part, rows in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels[rows])
    return images, labels


def test_digits_are_always_there():
    digits = load("digits")
    assert digits.features.shape == (1797, *describe("digits").input_shape)
    assert digits.features.dtype == torch.float32
    assert (digits.features.min(), digits.features.max()) == (0, 1)
    assert digits.targets.unique().tolist() == list(range(10))
    bunch = load_digits()
    assert torch.equal(digits.features[:, 0], torch.from_numpy(bunch.images / 16).float())
    assert torch.equal(digits.targets, torch.from_numpy(bunch.target))


@pytest.mark.parametrize("where", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_idx_files_are_read_bit_for_bit_wherever_they_usually_lie(where, suffix, tmp_path, offline):
    images, labels = small_mnist(tmp_path / where, suffix)
    read = load("mnist", tmp_path)
    np.testing.assert_array_equal((read.features[:, 0] * 255).round().numpy(), images)
    np.testing.assert_array_equal(read.targets.numpy(), labels)


def test_the_folder_may_come_from_the_environment(tmp_path, offline, monkeypatch):
    small_mnist(tmp_path / "fashion_mnist")
    monkeypatch.setenv("FLOWER_EXT_DATA", str(tmp_path))
    assert len(load("fashion-mnist")) == 30


@pytest.mark.parametrize("label_shape", [(-1,), (-1, 1)])
def test_both_parts_of_cifar_are_read_and_standardised(label_shape, tmp_path, offline):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 60).astype(np.uint8)
    np.savez(
        tmp_path / "cifar10.npz",
        x_train=images[:50],
        y_train=labels[:50].reshape(label_shape),
        x_test=images[50:],
        y_test=labels[50:].reshape(label_shape),
    )
    read = load("cifar10", tmp_path)
    assert read.targets.tolist() == labels.tolist()
    restored = read.features[:, 0] * 0.2470 + 0.4914
    np.testing.assert_allclose(restored.numpy() * 255, images[..., 0], atol=1e-3)


@pytest.mark.parametrize("name", [n for n in names() if n != "digits"])
def test_a_missing_data_set_says_which_file_where_and_what_to_do(name, tmp_path, offline):
    with pytest.raises(DataNotFound) as caught:
        load(name, tmp_path)
    text = str(caught.value)
    for word in (name, str(tmp_path), describe(name).files[0][0], f"{name}.npz", "FLOWER_EXT_DATA"):
        assert word in text


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'imagenet': expected one of digits, mnist"):
        load("imagenet")


def test_a_broken_idx_file_is_refused(tmp_path, offline):
    small_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x09x"))
    with pytest.raises(ValueError, match="not an idx file"):
        load("mnist", tmp_path)


def test_a_data_set_in_its_subfolder_comes_before_files_above(tmp_path, offline):
    small_mnist(tmp_path)
    small_mnist(tmp_path / "FashionMNIST" / "raw")
    for part, count in (("train", 20), ("t10k", 10)):
        labels = tmp_path / "FashionMNIST" / "raw" / f"{part}-labels-idx1-ubyte.gz"
        write_idx(labels, np.full(count, 7, np.uint8))
    assert load("fashion-mnist", tmp_path).targets.unique().tolist() == [7]


def test_an_empty_variable_names_no_folder(tmp_path, offline, monkeypatch):
    small_mnist(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWER_EXT_DATA", "")
    with pytest.raises(DataNotFound, match="data-folder='': expected"):
        load("mnist")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("t10k-labels-idx1-ubyte.gz", b"not gzip"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(b"\0")),
        ("train-images-idx3-ubyte.gz", gzip.compress(bytes(16 + 20 * 784))[:20]),
    ],
    ids=["not gzip", "too short", "cut off"],  # the archive's bytes contain a time stamp
)
def test_a_damaged_file_is_an_error_that_names_its_folder(file, content, tmp_path, offline):
    small_mnist(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"mnist: the files in {tmp_path} are damaged"):
        load("mnist", tmp_path)


def test_an_npz_of_something_else_is_refused(tmp_path, offline):
    np.savez(tmp_path / "cifar10.npz", other=np.zeros(2))
    with pytest.raises(ValueError, match="cifar10: the files in .* are damaged.*x_train"):
        load("cifar10", tmp_path)


def test_images_or_labels_that_do_not_fit_the_data_set_are_refused(tmp_path, offline):
    small_mnist(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.full(10, 99, np.uint8))
    with pytest.raises(ValueError, match="mnist: expected labels 0 … 9"):
        load("mnist", tmp_path)
    for part, count in (("train", 20), ("t10k", 10)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 14, 14), np.uint8))
    with pytest.raises(ValueError, match=r"shape \(1, 14, 14\); expected uint8 of \(1, 28, 28\)"):
        load("mnist", tmp_path)


def test_labels_belong_to_the_images_of_their_part_one_each(tmp_path, offline):
    small_mnist(tmp_path)
    for part, count in (("train", 21), ("t10k", 9)):
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.zeros(count, np.uint8))
    with pytest.raises(ValueError, match="20 images but 21 labels"):
        load("mnist", tmp_path)
    for part, count in (("train", 20), ("t10k", 10)):
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.zeros((count, 1), np.uint8))
    with pytest.raises(ValueError, match=r"labels of shape \(30, 1\); expected one for each of 30"):
        load("mnist", tmp_path)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_file_of_arrays_cannot_run_code(tmp_path, offline):
    hostile = np.array([Hostile(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "cifar10.npz", x=hostile, y=np.zeros(1))
    with pytest.raises(ValueError, match="cifar10: the files in .* are damaged"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason="needs the real data sets")
@pytest.mark.parametrize(
    ("name", "mean"),
    grid([("mnist", 0.1307), ("fashion-mnist", 0.2860)], lambda case: case[0] == "mnist"),
)
def test_the_real_images_have_their_published_mean(name, mean):
    real = load(name, REAL)
    assert real.features.shape == (70_000, 1, 28, 28)
    assert float(real.features[:60_000].mean()) == pytest.approx(mean, abs=1e-4)


LETTERS = Path("nist_vowels10") / "nist_vowels10_28x28.npz"


@pytest.mark.parametrize("where", [LETTERS, Path(LETTERS.name), Path("letters.npz")])
def test_letters_of_the_file_are_read_bit_for_bit(where, tmp_path, offline):
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = (np.arange(20) % 10).astype(np.uint8)
    (tmp_path / where).parent.mkdir(exist_ok=True)
    np.savez(tmp_path / where, x=images, y=labels, classes=np.array(list("aeiouAEIOU")))
    read = load("letters", tmp_path)
    np.testing.assert_array_equal((read.features[:, 0] * 255).round().numpy(), images)
    np.testing.assert_array_equal(read.targets.numpy(), labels)


@pytest.mark.skipif(not (REAL / LETTERS).is_file(), reason="needs the real letters")
def test_the_real_letters_are_ink_on_black_a_thousand_per_class():
    real = load("letters", REAL)
    assert real.features.shape == (10_000, 1, 28, 28)
    assert real.targets.bincount().tolist() == [1_000] * 10
    assert float(real.features.mean()) < 0.3
