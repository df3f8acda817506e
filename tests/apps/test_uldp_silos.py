"""The silos of each data set of Uldp-FL, as the app loads them."""

import math
import struct
from itertools import product

import numpy as np
import pytest
import torch

from flower_ext.data import DataNotFound, limit_contributions
from flower_ext.training.models import build
from tests.support.apps import ULDP_FL
from tests.support.grids import grid
from tests.support.real_data import REAL
from tests.support.silos import histogram

silos_ = ULDP_FL.module("silos")
describe_silos, load_silos, silo_names = silos_.describe_silos, silos_.load_silos, silos_.silo_names

pytestmark = pytest.mark.usefixtures("offline")

EMBEDDED = ["digits", "breast-cancer"]


def rows(silos) -> list[tuple[float, ...]]:
    return sorted(tuple(x.flatten().tolist()) for silo in silos for x in silo.train.features)


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_every_example_lies_in_one_silo_whatever_the_distribution(name, distribution):
    info = describe_silos(name)
    silos = load_silos(name, distribution=distribution)
    assert len(silos) == info.num_silos
    for silo in silos:
        assert silo.train.features.shape[1:] == info.feature_shape
        assert silo.train.targets.max() < info.num_classes
    assert rows(silos) == rows(load_silos(name, num_silos=1))
    sizes = [len(silo.test) for silo in silos]
    assert max(sizes) - min(sizes) <= 1
    held = histogram(silos, info.num_users)
    assert held.shape == (info.num_silos, info.num_users)
    assert held.sum() == sum(len(silo.train) for silo in silos)


def test_a_silo_that_loads_alone_derives_the_same_from_the_seed():
    one, again, other = (load_silos("digits", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a.owners, b.owners) for a, b in zip(one, again, strict=True))
    assert all(
        torch.equal(a.test.features, b.test.features) for a, b in zip(one, again, strict=True)
    )
    assert rows(one) != rows(other)


def test_users_of_few_labels_have_them_over_all_silos():
    silos = load_silos("digits", num_users=30, labels_per_user=2)
    labels: dict[int, set[int]] = {}
    for silo in silos:
        for user, examples in silo.by_user().items():
            labels.setdefault(user, set()).update(examples.targets.tolist())
    assert max(map(len, labels.values())) == 2


def test_limited_silos_hold_at_most_k_records_a_user_together():
    silos = load_silos("digits", num_users=20, distribution="zipf")
    held = histogram(silos, 20)
    limits = limit_contributions(held, 4, np.random.default_rng(0))
    kept = [
        s.limited(most, np.random.default_rng(1)) for s, most in zip(silos, limits, strict=True)
    ]
    np.testing.assert_array_equal(histogram(kept, 20), limits)
    np.testing.assert_array_equal(limits.sum(axis=0), np.minimum(held.sum(axis=0), 4))


@pytest.mark.parametrize("name", silo_names())
def test_the_model_of_a_data_set_takes_its_records(name):
    info = describe_silos(name)
    outputs = build(info.model)(torch.zeros(3, *info.feature_shape))
    assert outputs.shape == (3, info.num_classes)


@pytest.mark.parametrize("name", [name for name in silo_names() if name not in EMBEDDED])
def test_missing_files_are_an_error_that_names_them(name, tmp_path):
    with pytest.raises(DataNotFound, match=name.removesuffix("-scaled")):  # the same files
        load_silos(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("wine", {}, "name='wine': expected one of digits, breast-cancer"),
        ("digits", {"num_users": 0}, "num_users=0"),
        ("digits", {"num_silos": 0}, "num_silos=0"),
        ("digits", {"distribution": "even"}, "distribution='even'"),
        ("heart-disease", {"num_silos": 5}, "num_silos=5: expected 4"),
        ("tcga-brca", {"labels_per_user": 2}, "labels_per_user=2: expected None"),
    ],
)
def test_unfit_arguments_are_refused_by_name(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_silos(name, **arguments)


def test_mnist_of_another_size_has_no_known_test_images_and_is_refused(tmp_path):
    for part, count in (("train", 30), ("t10k", 10)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(header + bytes(math.prod(shape)))
    with pytest.raises(ValueError, match="mnist: 40 images, expected 70000"):
        load_silos("mnist", tmp_path, num_users=3, num_silos=2)


@pytest.mark.skipif(not (REAL / "tcga_brca").is_dir(), reason="needs the real data sets")
@pytest.mark.parametrize(
    ("name", "distribution"),
    grid(
        product(["heart-disease", "tcga-brca", "creditcard"], ["uniform", "zipf"]),
        lambda case: case != ("creditcard", "uniform"),
    ),
)
def test_the_real_silos_have_users_in_common(name, distribution):
    info = describe_silos(name)
    silos = load_silos(name, REAL, distribution=distribution, num_users=50)
    held = histogram(silos, 50)
    assert ((held == 0) | (held >= info.records_per_user)).all()
    assert (np.count_nonzero(held, axis=0) > 1).sum() > 25
    if info.fixed_silos and distribution == "zipf":
        assert 0.7 < held.max(axis=0).sum() / held.sum() < 0.95
