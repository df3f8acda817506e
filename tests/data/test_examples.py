"""Examples keep features and targets together."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.data import (
    ClientData,
    Examples,
    SiloData,
    within_unit_ball,
)
from flower_ext.errors import InvalidValue


def examples(count: int = 5) -> Examples:
    return Examples(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count))


def test_features_and_targets_must_have_as_many_rows():
    with pytest.raises(ValueError, match="3 rows of features but 2 rows of targets"):
        Examples(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="targets are a single number"):
        Examples(torch.zeros(1, 1), torch.tensor(0))
    with pytest.raises(
        ValueError, match=r"3 rows of features\['a'\] but 2 rows of features\['b'\]"
    ):
        Examples({"a": torch.zeros(3, 1), "b": torch.zeros(2)}, torch.zeros(3))
    with pytest.raises(ValueError, match=r"3 rows of features\[0\] but 2 rows of targets\['y'\]"):
        Examples((torch.zeros(3, 1),), {"y": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"features\['b'\] are a single number"):
        Examples({"a": torch.zeros(3, 1), "b": torch.tensor(1)}, torch.zeros(3))


@pytest.mark.parametrize("indices", [[3, 0, 3], (3, 0, 3), np.array([3, 0, 3])])
def test_a_subset_keeps_rows_together_in_the_order_asked_for(indices):
    chosen = examples().subset(indices)
    assert chosen.targets.tolist() == [3, 0, 3]
    assert chosen.features.tolist() == [[6, 7], [0, 1], [6, 7]]


def test_an_empty_subset_keeps_the_shape_of_a_row():
    chosen = examples().subset([])
    assert len(chosen) == 0
    assert chosen.features.shape == (0, 2)


def test_a_subset_is_a_copy():
    pool = examples()
    pool.subset([1]).features.zero_()
    assert pool.features[1].tolist() == [2, 3]


def test_an_index_beyond_the_end_is_refused():
    with pytest.raises(IndexError):
        examples().subset([5])


def test_moving_moves_both_parts():
    moved = examples().to(torch.device("meta"))
    assert {moved.features.device.type, moved.targets.device.type} == {"meta"}


def test_neither_part_of_a_clients_data_can_be_exchanged():
    data = ClientData(train=examples(), test=examples())
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train = examples()
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train.targets = torch.zeros(5)


@pytest.mark.parametrize("indices", [np.array([True, False, True, False, False]), [1.7]])
def test_indices_that_are_not_integers_are_refused(indices):
    with pytest.raises(TypeError, match=r"expected integers"):
        examples().subset(indices)


def test_data_of_another_type_are_refused_by_type():
    x, y = torch.zeros(2, 1), torch.zeros(2)
    for features, targets, message in (
        (x.tolist(), y, "features of type list"),
        (x, y.numpy(), "nd"),
    ):
        with pytest.raises(TypeError, match=f"{message}.*: expected a torch.Tensor"):
            Examples(features, targets)
    with pytest.raises(TypeError, match="test of type NoneType: expected Examples"):
        ClientData(train=Examples(x, y), test=None)
    with pytest.raises(TypeError, match="train of type tuple: expected Examples"):
        SiloData(train=(x, y), test=Examples(x, y), owners=torch.zeros(2, dtype=torch.long))


def tree(count: int = 6) -> Examples:
    """Return examples in which every part contains the number of its row."""
    rows = torch.arange(count)
    return Examples({"a": rows, "b": (rows.float().unsqueeze(1),)}, (rows, {"y": rows}))


def rows_of(data: Examples) -> list[int]:
    """Return the row numbers, after checking that all parts agree."""
    kept = data.features["a"]
    assert torch.equal(data.features["b"][0], kept.float().unsqueeze(1))
    assert torch.equal(data.targets[0], kept)
    assert torch.equal(data.targets[1]["y"], kept)
    return kept.tolist()


def test_rows_of_a_tree_stay_together():
    assert len(tree()) == 6
    assert rows_of(tree().subset([3, 0, 3])) == [3, 0, 3]
    assert len(tree().subset([])) == 0
    moved = tree().to(torch.device("meta"))
    assert moved.features["b"][0].device.type == moved.targets[1]["y"].device.type == "meta"
    data = SiloData(train=tree(), test=tree(2), owners=torch.tensor([4, 0, 4, 2, 0, 4]))
    by_user = {user: rows_of(user_examples) for user, user_examples in data.by_user().items()}
    assert by_user == {0: [1, 4], 2: [3], 4: [0, 2, 5]}
    kept = data.limited(np.array([1, 0, 0, 0, 2]), np.random.default_rng(0))
    counts = {user: len(rows_of(user_examples)) for user, user_examples in kept.by_user().items()}
    assert counts == {0: 1, 4: 2}


def test_form_of_plain_tensors_is_unchanged_and_trees_are_by_name():
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    assert Examples(x, y).row_type == ((x.shape[1:], x.dtype), (y.shape[1:], y.dtype))
    assert Examples({"a": x, "b": y}, y).row_type == Examples({"b": y, "a": x}, y).row_type
    splits = Examples((x, x), (x,)), Examples((x,), (x, x)), Examples((x, x), x)
    assert len({examples.row_type for examples in splits}) == 3


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=50)
def test_scaling_puts_every_record_in_the_unit_ball_in_its_direction(seed, length):
    features = torch.from_numpy(
        np.random.default_rng(seed).normal(0, length, (6, 20)).astype(np.float32)
    )
    examples = Examples(features, torch.arange(6))
    (data,) = within_unit_ball([ClientData(train=examples, test=examples.subset([0]))])
    scaled = data.train.features
    assert scaled.dtype == torch.float32
    norms = features.double().norm(dim=1, keepdim=True)
    assert (scaled.double().norm(dim=1) <= 1).all()
    torch.testing.assert_close(
        scaled.double(), features.double() / norms.clamp(min=1), rtol=2e-6, atol=1e-9
    )
    assert torch.equal(data.train.targets, examples.targets)
    assert torch.equal(data.test.features, scaled[:1])
    (twice,) = within_unit_ball([data])
    assert torch.equal(twice.train.features, scaled)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_rounding_to_other_types_keeps_records_in_the_unit_ball(kind):
    features = torch.from_numpy(np.random.default_rng(0).normal(0, 9, (2000, 2))).to(kind)
    examples = Examples(features, torch.zeros(2000))
    (data,) = within_unit_ball([ClientData(train=examples, test=examples)])
    assert data.train.features.dtype == kind
    assert (data.train.features.double().norm(dim=1) <= 1).all()


def test_whole_numbers_cannot_be_scaled_into_the_unit_ball():
    pixels = Examples(torch.full((2, 3), 200, dtype=torch.uint8), torch.zeros(2))
    with pytest.raises(InvalidValue, match="expected one tensor of floating-point numbers"):
        within_unit_ball([ClientData(train=pixels, test=pixels)])


def test_records_in_the_unit_ball_stay_and_images_scale_as_a_whole():
    inside = Examples(torch.tensor([[0.3, -0.7], [0.0, 0.0], [1.0, 0.0]]), torch.zeros(3))
    (data,) = within_unit_ball([ClientData(train=inside, test=inside)])
    assert torch.equal(data.train.features, inside.features)
    images = Examples(torch.ones(3, 1, 4, 4), torch.zeros(3))
    (data,) = within_unit_ball([ClientData(train=images, test=images)])
    assert data.train.features.shape == (3, 1, 4, 4)
    torch.testing.assert_close(data.train.features, torch.full((3, 1, 4, 4), 0.25))
