"""Trees of tensors: their rows, their forms, and the types of their leaves."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from flower_ext.data import trees
from tests.support.trees import Output

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Found:
    logits: torch.Tensor
    aside: tuple[torch.Tensor, ...]


def column(count=4):
    return torch.arange(count)


TREES = {
    "tensor": column(),
    "tuple": (column(), 2 * column()),
    "named tuple": Pair(column(), 2 * column()),
    "mapping": {"a": column(), "b": {"c": (3 * column(),)}},
    "dataclass": Found(column(), (2 * column(),)),
    "ModelOutput": Output(logits=column(), hidden=(2 * column(),)),
}


@pytest.mark.parametrize("which", TREES)
def test_rows_are_taken_from_every_leaf_and_types_stay(which):
    tree = TREES[which]
    chosen = trees.rows(tree, torch.tensor([3, 1]))
    assert type(chosen) is type(tree)
    for (name, ours), (place, leaf) in zip(
        trees.named("x", chosen), trees.named("x", tree), strict=True
    ):
        assert name == place
        assert ours.tolist() == [int(leaf[3]), int(leaf[1])]


@pytest.mark.parametrize("which", TREES)
def test_pieces_and_single_rows_are_those_of_every_leaf(which):
    tree = TREES[which]
    for pieces, sizes in ((trees.split(tree, 3), [3, 1]), (trees.split(tree, [1, 3]), [1, 3])):
        assert [trees.length(piece) for piece in pieces] == sizes
        back = trees.mapped(lambda *leaves: torch.cat(leaves), *pieces)
        assert type(back) is type(tree)
        for (_, ours), (_, leaf) in zip(
            trees.named("x", back), trees.named("x", tree), strict=True
        ):
            assert torch.equal(ours, leaf)
    for row, one in enumerate(trees.each(tree)):
        for (_, ours), (_, leaf) in zip(trees.named("x", one), trees.named("x", tree), strict=True):
            assert torch.equal(ours, leaf[row])


def test_leaves_of_several_trees_meet_by_name_and_not_by_order():
    one, other = {"a": torch.tensor(1), "b": torch.tensor(2)}, {"b": 10, "a": 20}
    assert trees.mapped(lambda x, y: int(x) * y, one, other) == {"a": 20, "b": 20}


def test_form_tells_names_shapes_and_types_apart_and_no_order():
    tokens, mask = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5)
    form = trees.row_type({"tokens": tokens, "mask": mask})
    assert form == trees.row_type({"mask": mask[:1], "tokens": tokens[:1]})
    others = [
        {"tokens": tokens},
        {"tokens": tokens, "other": mask},
        {"tokens": tokens, "mask": mask[:, :4]},
        {"tokens": tokens, "mask": mask.double()},
        (tokens, mask),
        (mask, tokens),
        ((tokens, mask),),
        tokens,
    ]
    forms = {form, *map(trees.row_type, others)}
    assert len(forms) == 1 + len(others)


def test_mappings_become_dictionaries_and_other_things_are_named():
    kept = trees.checked("features", UserDict(a=UserDict(b=column())))
    assert type(kept) is dict
    assert type(kept["a"]) is dict
    for odd, message in (
        ({"a": {"b": [1.0]}}, r"features\['a'\]\['b'\] of type list: expected a torch.Tensor"),
        ((column(), None), r"features\[1\] of type NoneType"),
        ({}, "features of type dict: .* of at least one"),
        ({0: column()}, "features of type dict: .*strings as keys"),
        (Found(column(), ()), "features of type Found"),
    ):
        with pytest.raises(TypeError, match=message):
            trees.checked("features", odd)


def test_only_floating_point_leaves_become_double():
    tree = trees.double({"words": column(), "weights": torch.zeros(2)})
    assert {name: leaf.dtype for name, leaf in tree.items()} == {
        "words": torch.int64,
        "weights": torch.float64,
    }
