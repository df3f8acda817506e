"""Readers of files: FEMNIST's digits and CIFAR-10's images."""

from pathlib import Path

import numpy as np
import pytest

from flower_ext.data import load
from tests.support.real_data import REAL

FEMNIST = Path("femnist_digits_12clients") / "femnist_digits_12clients.npz"
CIFAR = Path("cifar10") / "cifar10.npz"


@pytest.mark.parametrize("where", [FEMNIST, Path(FEMNIST.name)])
def test_femnist_digits_are_read_bit_for_bit(where, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = (np.arange(20) % 10).astype(np.uint8)
    (tmp_path / where).parent.mkdir(exist_ok=True)
    np.savez(tmp_path / where, x=images, y=labels, client=labels, split=np.full(20, "train"))
    read = load("femnist", tmp_path)
    np.testing.assert_array_equal((read.features[:, 0] * 255).round().numpy(), images)
    np.testing.assert_array_equal(read.targets.numpy(), labels)


@pytest.mark.skipif(not (REAL / FEMNIST).is_file(), reason="needs the real FEMNIST digits")
def test_the_real_femnist_digits_are_white_paper_of_ten_classes():
    real = load("femnist", REAL)
    assert real.features.shape == (5_997, 1, 28, 28)
    assert real.targets.unique().tolist() == list(range(10))
    assert float(real.features.mean()) > 0.9


@pytest.mark.skipif(not (REAL / CIFAR).is_file(), reason="needs the real CIFAR-10")
def test_the_real_cifar10_is_standardised():
    real = load("cifar10", REAL)
    assert real.features.shape == (60_000, 3, 32, 32)
    assert real.targets.bincount().tolist() == [6_000] * 10
    train = real.features[:50_000]
    np.testing.assert_allclose(train.mean(dim=(0, 2, 3)).numpy(), 0, atol=1e-3)
    np.testing.assert_allclose(train.std(dim=(0, 2, 3)).numpy(), 1, atol=1e-3)
