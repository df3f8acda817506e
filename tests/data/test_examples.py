import dataclasses

import numpy as np
import pytest
import torch

from flower_ext.data import ClientData, Examples


def examples(count: int = 5) -> Examples:
    return Examples(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count))


def test_features_and_targets_must_have_as_many_rows():
    with pytest.raises(ValueError, match="3 features but 2 targets"):
        Examples(torch.zeros(3, 1), torch.zeros(2))


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
def test_indices_that_are_no_integers_are_refused_rather_than_read_as_rows_0_and_1(indices):
    with pytest.raises(TypeError, match=r"expected integers"):
        examples().subset(indices)
