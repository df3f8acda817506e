"""Generated devices have the sizes and distributions of Upcycled-FL's synthetic data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from flower_ext.data import ClientData
from tests.support.apps import UPCYCLED_FL
from tests.support.grids import grid
from tests.support.real_data import REAL

synthetic = UPCYCLED_FL.module("synthetic")
device_sizes, file_name, generate = synthetic.device_sizes, synthetic.file_name, synthetic.generate
kinds, read = synthetic.kinds, synthetic.read

# Table 2 of the paper: samples, test samples, and the standard deviation of the devices' sizes.
TABLE = {
    "iid": (6_726, 683, 166),
    "0-0": (13_791, 1_395, 841),
    "0.5-0.5": (8_036, 818, 410),
    "1-1": (10_493, 1_063, 586),
}


def rng(seed=0):
    return np.random.default_rng(seed)


def together(devices: list[ClientData], part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return the features and targets of all devices as two arrays."""
    parts = [getattr(data, part) for data in devices]
    features, targets = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("features", "targets")
    )
    return features.numpy(), targets.numpy()


def sizes(devices: list[ClientData]) -> np.ndarray:
    return np.array([len(data.train) + len(data.test) for data in devices])


def means(kind: str) -> np.ndarray:
    """Return the feature means (devices × 20) of many devices."""
    devices = generate(kind, rng=rng(), num_devices=400)
    return np.stack([data.train.features.numpy().mean(axis=0) for data in devices])


@pytest.mark.parametrize("kind", kinds())
def test_shapes_types_and_sizes_are_those_of_table_2(kind):
    devices = generate(kind, rng=rng())
    samples, tested, _ = TABLE[kind]
    assert len(devices) == 30
    assert sizes(devices).sum() == samples
    assert sum(len(data.test) for data in devices) == pytest.approx(tested, abs=20)
    assert min(len(data.train) for data in devices) >= 45
    assert min(len(data.test) for data in devices) >= 5
    for part in ("train", "test"):
        features, targets = together(devices, part)
        assert (features.dtype, features.shape[1:]) == (np.float32, (20,))
        assert targets.dtype == np.int64
        assert set(targets) <= set(range(10))
        assert len(set(targets)) >= 8


@pytest.mark.parametrize("kind", grid(kinds(), {"iid", "0-0"}.__contains__))
def test_sizes_match_the_mean_and_deviation_of_table_2(kind):
    samples, _, deviation = TABLE[kind]
    draws = np.stack([device_sizes(kind, rng=rng(seed)) for seed in range(200)])
    assert set(draws.sum(axis=1)) == {samples}
    assert draws.std(axis=1).mean() == pytest.approx(deviation, rel=0.01)
    assert draws.min() >= 50
    assert np.median(draws) < 0.8 * draws.mean()  # log-normal: the mean exceeds the median


@given(st.sampled_from(kinds()), st.integers(1, 60), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_any_number_of_devices_keeps_the_mean_size(kind, count, seed):
    drawn = device_sizes(kind, rng=rng(seed), num_devices=count)
    assert drawn.shape == (count,)
    assert drawn.min() >= 50
    assert drawn.mean() == pytest.approx(TABLE[kind][0] / 30, abs=0.5)


@pytest.mark.parametrize("kind", kinds())
def test_a_devices_features_are_uncorrelated_with_variances_j_to_minus_1_2(kind):
    devices = generate(kind, rng=rng(), num_devices=150)
    centred = [data.train.features - data.train.features.mean(dim=0) for data in devices]
    covariance = np.cov(torch.cat(centred).numpy().T)
    np.testing.assert_allclose(covariance.diagonal(), np.arange(1, 21) ** -1.2, rtol=0.05)
    deviations = np.sqrt(covariance.diagonal())
    correlation = covariance / np.outer(deviations, deviations)
    assert np.abs(correlation - np.eye(20)).max() < 0.03


def test_iid_devices_centre_at_zero_and_others_at_normal_points():
    assert np.abs(means("iid")[:, -1]).max() < 0.15
    for kind, gamma in (("0-0", 0.0), ("0.5-0.5", 0.5), ("1-1", 1.0)):
        centres = means(kind)
        assert centres.var(axis=0).mean() == pytest.approx(1 + gamma, rel=0.15)
        # The mean over 20 features is B_k up to a variance of 1/20.
        assert centres.mean(axis=1).var() == pytest.approx(gamma + 1 / 20, rel=0.2)


def test_label_shares_differ_more_among_devices_that_do_not_share_one_classifier():
    def distance(kind):
        devices = generate(kind, rng=rng(3), num_devices=100)
        shares = np.stack([d.train.targets.bincount(minlength=10) / len(d.train) for d in devices])
        return np.abs(shares - shares.mean(axis=0)).sum(axis=1).mean() / 2

    distances = [distance(kind) for kind in kinds()]
    assert distances[0] < 0.2
    assert min(distances[1:]) > 0.5


def test_one_linear_classifier_fits_every_iid_device_but_not_0_0():
    def fit(devices):
        return (
            LogisticRegression(C=100, max_iter=500)
            .fit(*together(devices))
            .score(*together(devices))
        )

    shared = generate("iid", rng=rng(1), num_classes=3)
    labels_by_device = generate("0-0", rng=rng(1), num_classes=3)
    assert fit(shared) > 0.99
    assert fit(labels_by_device) < 0.9
    largest = max(labels_by_device, key=lambda data: len(data.train))
    assert fit([largest]) > 0.97


def test_two_classes_make_the_problem_binary():
    devices = generate("1-1", rng=rng(), num_classes=2)
    assert set(together(devices)[1]) == {0, 1}


@pytest.mark.parametrize("kind", kinds())
def test_the_generator_decides_and_no_global_randomness_is_touched(kind):
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    first, again, other = (generate(kind, rng=rng(seed)) for seed in (5, 5, 6))
    after = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    for part in ("train", "test"):
        for a, b in zip(together(first, part), together(again, part), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(sizes(first), sizes(other))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generate("2-2", rng=rng()), "kind='2-2': expected one of iid, 0-0"),
        (
            lambda: generate("iid", rng=rng(), num_devices=0),
            "num_devices=0: expected an integer >= 1",
        ),
        (lambda: generate("iid", rng=rng(), num_classes=1), "num_classes=1: expected at least 2"),
        (lambda: file_name("0_0"), "kind='0_0'"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def arrays(**changed) -> dict[str, np.ndarray]:
    """Return a file of three devices with 4, 5 and 6 training and 1, 2 and 3 test examples."""
    content = {}
    for part, base in (("train", 4), ("test", 1)):
        client = np.repeat(np.arange(3), base + np.arange(3))[::-1]
        content |= {
            f"x_{part}": rng(1).normal(size=(len(client), 20)),
            f"y_{part}": (np.arange(len(client)) % 2).astype(np.uint8),
            f"client_{part}": client.astype(np.int16),
        }
    return content | changed


def test_a_file_is_read_device_by_device(tmp_path):
    content = arrays()
    np.savez(tmp_path / "devices.npz", **content)
    devices = read(tmp_path / "devices.npz")
    assert [(len(data.train), len(data.test)) for data in devices] == [(4, 1), (5, 2), (6, 3)]
    for number, data in enumerate(devices):
        for part, examples in (("train", data.train), ("test", data.test)):
            of_device = content[f"client_{part}"] == number
            np.testing.assert_array_equal(
                examples.features.numpy(), content[f"x_{part}"][of_device].astype(np.float32)
            )
            np.testing.assert_array_equal(examples.targets.numpy(), content[f"y_{part}"][of_device])
            assert examples.features.dtype == torch.float32
            assert examples.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_train": np.zeros((15, 19))}, "finite features of shape"),
        ({"x_train": np.full((15, 20), np.nan)}, "finite features of shape"),
        ({"y_test": np.zeros(5, np.uint8)}, "6 features, 5 targets and 6 devices"),
        ({"y_test": np.zeros(6)}, "integer targets"),
        ({"y_test": np.full(6, -1)}, "integer targets"),
        ({"y_test": np.full(6, 2)}, "integer targets 0 or 1"),
        ({"y_test": np.zeros((6, 1), np.uint8)}, "one for each record"),
        ({"client_test": np.array([0, 0, 0, 1, 1, 1])}, "3 devices for training but 2 for tests"),
        ({"client_test": np.array([0, 0, 0, 1, 1, 3])}, "devices numbered 0 … 2"),
    ],
)
def test_a_file_of_something_else_is_refused(changed, message, tmp_path):
    np.savez(tmp_path / "devices.npz", **arrays(**changed))
    with pytest.raises(ValueError, match=f"devices.npz: .*{message}"):
        read(tmp_path / "devices.npz")


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.npz"):
        read(tmp_path / "absent.npz")
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", other=np.zeros(2))
    for name in ("damaged.npz", "text.npz", "other.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a file of synthetic devices"):
            read(tmp_path / name)


@pytest.mark.skipif(not (REAL / file_name("iid")).is_file(), reason="needs the authors' files")
@pytest.mark.parametrize("kind", kinds())
def test_the_authors_files_have_the_sizes_of_table_2_and_two_classes(kind):
    devices = read(REAL / file_name(kind))
    samples, tested, deviation = TABLE[kind]
    assert len(devices) == 30
    assert sizes(devices).sum() == samples
    assert sizes(devices).std() == pytest.approx(deviation, abs=0.5)
    assert sum(len(data.test) for data in devices) == tested
    assert set(together(devices)[1]) == {0, 1}
