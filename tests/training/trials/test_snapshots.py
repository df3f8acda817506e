"""A snapshot sees whatever can be kept between two passes, and nothing else differs."""

import random
import types
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional

from flower_ext.training.trials.snapshots import (
    changed_places,
    same_numbers,
    same_params,
    snapshot,
)
from tests.support.keeping import remember

TOTAL = [0]


class Counter:
    """An object whose number grows."""

    of_all = 0
    of_all__ = 0

    def __init__(self):
        self.number = 0

    def __call__(self):
        self.number += 1

    def count_all(self):
        type(self).of_all += 1

    def count_all_too(self):
        type(self).of_all__ += 1


class Slotted:
    __slots__ = "number"

    def __init__(self):
        self.number = 0

    def __call__(self):
        self.number += 1


class OfBoth(Slotted):
    """Slots, and a dictionary beside them."""


class Unassigned(Slotted):
    __slots__ = ("later",)


class Counting(count):
    """An iterator with a dictionary beside its state."""


class PicklesItself:
    """An object whose state only its own method shows."""

    def __reduce__(self):
        return PicklesItself, (*TOTAL,)


class WithStatic:
    """A class that holds a function, which encloses a number."""

    held = None

    @staticmethod
    def fixed():
        return TOTAL[0]

    @classmethod
    def of_class(cls):
        return TOTAL[0]


def adding(numbers):
    return lambda: numbers.append(1)


def enclosing():
    """Return a function that encloses a list, and a change of the list."""
    box = []

    def function():
        return box

    return function, adding(box)


def with_default():
    """Return a function with a list as a default, and a change of the list."""
    box = []

    def function(kept=box, *, other=None):
        return kept, other

    return function, adding(box)


def with_attribute():
    """Return a function with an attribute, and a change of the attribute."""

    def function():
        pass

    function.calls = 0
    return function, lambda: setattr(function, "calls", function.calls + 1)


def of_global():
    """Return a function that reads a global list, and a change of the list."""

    def function():
        def inner():
            return TOTAL

        return inner

    return function, adding(TOTAL)


def of_another_function():
    """Return a function that calls one of this project, which reads a global variable."""
    return lambda: total(), adding(TOTAL)


def total():
    return TOTAL[0]


def of_another_class():
    return lambda: Counter, Counter().count_all


def holding(kind):
    """Return a maker of an object that holds a list, and of a change of the list."""

    def made():
        box = []
        return kind(box), adding(box)

    return made


def calling(kind, by=None):
    """Return a maker of an object, and of a change that calls it."""

    def made():
        value = kind()
        return value, partial(by or (lambda value: value()), value)

    return made


def module_of():
    layer = nn.Linear(1, 1)
    return layer, lambda: layer.weight.data.add_(1)


def buffered():
    layer = nn.BatchNorm1d(2)
    return layer, lambda: layer(torch.randn(4, 2))


def deep():
    box = inner = []
    for _ in range(30):
        box = [box]
    return box, adding(inner)


def unpickled():
    """Return an object that can only be compared by what it is."""
    box = [(number for number in range(3))]
    return box, lambda: box.__setitem__(0, (number for number in range(3)))


def of_neighbours():
    """Return lists that hold the same numbers in the same order before and after the change."""
    lists = [[0, 1], [2]]
    return lists, lambda: lists[1].insert(0, lists[0].pop())


def of_a_default():
    function = with_default()[0]
    return function, lambda: setattr(function, "__defaults__", ([2],))


def of_a_global():
    return total, lambda: globals().update(TOTAL=[*TOTAL, 2])


class Two:
    """A class whose number differs from that of another class."""

    number = 2


def of_another_kind():
    counter = Counter()
    return counter, lambda: setattr(counter, "__class__", Two)


def of_other_attributes():
    counter = Counter()
    return counter, lambda: setattr(counter, "__dict__", {"number": 1})


def of_other_code():
    function = with_default()[0]
    return function, lambda: setattr(function, "__code__", (lambda kept: TOTAL).__code__)


KEEPING = {
    "another class of an object": of_another_kind,
    "other attributes": of_other_attributes,
    "other code": of_other_code,
    "the list of a number": of_neighbours,
    "a key": lambda: (numbers := {"a": 1}, lambda: numbers.update(b=numbers.pop("a"))),
    "another default": of_a_default,
    "another value of a global variable": of_a_global,
    "a list": holding(lambda box: box),
    "a list in a tuple": holding(lambda box: (box,)),
    "a list in a mapping": holding(lambda box: {1: box}),
    "a set": lambda: (numbers := {0}, lambda: numbers.add(1)),
    "a list of lists": deep,
    "a text": lambda: (texts := ["a"], lambda: texts.__setitem__(0, "b")),
    "a tensor": lambda: (t := torch.zeros(2), lambda: t.add_(1)),
    "a tensor's shape": lambda: (ts := [torch.zeros(2)], lambda: ts.__setitem__(0, ts[0][None])),
    "a weight": module_of,
    "a buffer": buffered,
    "an object": calling(Counter),
    "a slot": calling(Slotted),
    "a slot beside a dictionary": calling(OfBoth),
    "a slot beside one without a value": calling(Unassigned),
    "a class": lambda: (Counter, Counter().count_all),
    "the class of an object": calling(Counter, Counter.count_all),
    "an attribute that ends like a special one": calling(Counter, Counter.count_all_too),
    "a method": lambda: ((c := Counter()).count_all, c),
    "what a method reads": lambda: (WithStatic().of_class, adding(TOTAL)),
    "a static method": lambda: (WithStatic, adding(TOTAL)),
    "arguments of a partial function": holding(lambda box: partial(print, box)),
    "named arguments of a partial function": holding(lambda box: partial(print, end=box)),
    "a function within a partial one": lambda: (partial((f := enclosing())[0]), f[1]),
    "what a function encloses": enclosing,
    "a default": with_default,
    "an attribute of a function": with_attribute,
    "a global variable of a function within": of_global,
    "another function": of_another_function,
    "another class": of_another_class,
    "a generator of tensors": calling(torch.Generator, lambda g: torch.rand(1, generator=g)),
    "a generator of Python": calling(random.Random, lambda g: g.random()),
    "an iterator": calling(count, next),
    "an iterator of one's own class": calling(Counting, next),
    "what pickles itself": lambda: (PicklesItself(), adding(TOTAL)),
    "a function of another module": lambda: (lambda: remember, partial(remember, 1.0)),
    "an iterator of a list": lambda: (i := iter([1, 2, 3]), lambda: next(i)),
    "what does not pickle": unpickled,
}


@pytest.mark.parametrize("what", KEEPING)
def test_snapshots_differ_exactly_where_something_changed(what):
    root, change = KEEPING[what]()
    before = snapshot(root=root)
    assert changed_places(before, snapshot(root=root)) == []
    change()
    after = snapshot(root=root)
    assert changed_places(before, after) != []
    assert changed_places(after, snapshot(root=root)) == []


def test_an_equal_object_in_the_place_of_another_is_no_change():
    root = Counter()
    root.numbers, root.weight, root.text = [1.5], torch.ones(2), "a"
    before = snapshot(root=root)
    root.numbers, root.weight, root.text = [float("1.5")], torch.ones(2), "".join(["a"])
    assert changed_places(before, snapshot(root=root)) == []


def test_a_number_is_not_mistaken_for_a_former_one_at_its_address():
    root = Counter()
    for number in range(100):
        before = snapshot(root=root)
        root.number = number + 0.25
        assert changed_places(before, snapshot(root=root)) == ["root.number"]


def test_places_are_named():
    layer = nn.Sequential(nn.Linear(1, 1))
    layer.kept = {"a": [0], 3: 0}
    before = snapshot(model=layer)
    layer[0].bias.data += 1
    layer.kept["a"][0] = layer.kept[3] = 1
    after = snapshot(model=layer)
    assert changed_places(before, after) == ["model.0.bias", "model.kept.a[0]", "model.kept[3]"]


def test_an_attribute_that_appears_or_vanishes_is_a_change():
    assert (
        changed_places({"a": 1}, {"a": 1, "b": 2})
        == changed_places({"a": 1, "b": 2}, {"a": 1})
        == ["b"]
    )


@pytest.mark.parametrize(
    "root",
    [types.ModuleType("m"), functional.relu, functional.linear, len],
    ids=["a module", "a function of PyTorch", "one that is built in", "one of Python"],
)
def test_libraries_are_left_out(root):
    assert snapshot(root=root) == {}


def test_circles_and_chains_of_any_length_come_to_an_end():
    circle = []
    circle.append(circle)
    assert snapshot(root=circle) == {"root": (list, 1)}
    chain = []
    for _ in range(10_000):
        chain = [chain]
    assert 30 < len(snapshot(root=chain)) < 100


def test_a_variable_that_is_not_assigned_yet_is_nothing():
    def function():
        return later, box

    box = []
    before = snapshot(root=function)
    later = 1
    box.append(later)
    after = snapshot(root=function)
    assert changed_places(before, after) == ["box of root", "box of root[0]", "later of root"]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    is_cpu = False


def test_numbers_are_the_same_if_all_their_bits_are():
    one = torch.tensor([1.0, torch.nan])
    assert same_numbers(one, one.clone())
    for other in ([1.0, 0.0], [torch.nan, torch.nan], [1.0 + 2**-23, torch.nan]):
        assert not same_numbers(one, torch.tensor(other))
        assert not same_numbers(torch.tensor(other), one)


def test_on_an_accelerator_rounding_is_no_difference():
    one, rounded, other = (
        torch.tensor([first, torch.nan]).as_subclass(Elsewhere)
        for first in (1.0, 1.0 + 2**-23, 1.1)
    )
    assert same_numbers(one, rounded)
    assert not same_numbers(one, other)


def test_parameters_are_the_same_if_all_are_or_both_are_missing():
    one, other = {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(2)}
    assert same_params(one, {name: part.clone() for name, part in one.items()})
    assert not same_params(one, {**other, "b": torch.ones(1)})
    assert same_params(ValueError(), TypeError())
    assert not same_params(one, ValueError())
    assert not same_params(ValueError(), one)
