from pathlib import Path

import pytest

from flower_ext.runs.settings import (
    UnfitSetting,
    absolute_path,
    choice,
    flag,
    integer,
    num_nodes,
    number,
    text,
)

CONFIG = {"switch": True, "count": 3, "rate": 0.5, "word": "", "quoted": "false", "digits": "2"}


def test_settings_are_read_as_what_they_are():
    assert flag(CONFIG, "switch") is True
    assert integer(CONFIG, "count", least=3) == 3
    assert number(CONFIG, "rate") == 0.5
    assert text(CONFIG, "word") == ""


def test_a_path_is_absolute_or_empty():
    assert absolute_path({"folder": ""}, "folder") is None
    assert absolute_path({"folder": "/a/b"}, "folder") == Path("/a/b")
    assert absolute_path({"folder": "~/a"}, "folder") == Path.home() / "a"
    with pytest.raises(UnfitSetting, match="run-config folder='a': expected an absolute path"):
        absolute_path({"folder": "a"}, "folder")


def test_an_integer_is_a_number():
    assert number(CONFIG, "count") == 3.0


@pytest.mark.parametrize(
    ("read", "name", "said"),
    [
        (flag, "quoted", "quoted='false': expected true or false"),
        (flag, "count", "count=3: expected true or false"),
        (integer, "digits", "digits='2': expected an integer"),
        (integer, "rate", r"rate=0\.5: expected an integer"),
        (integer, "switch", "switch=True: expected an integer"),
        (number, "digits", "digits='2': expected a number"),
        (number, "switch", "switch=True: expected a number"),
        (text, "count", "count=3: expected a text"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(read, name, said):
    with pytest.raises(ValueError, match=f"^run-config {said}$"):
        read(CONFIG, name)


def test_an_integer_below_the_least_is_refused():
    with pytest.raises(ValueError, match="run-config count=3: expected an integer >= 4"):
        integer(CONFIG, "count", least=4)


@pytest.mark.parametrize("value", [0, 0.0, -1, float("nan")])
def test_a_number_that_is_not_above_another_is_refused(value):
    with pytest.raises(ValueError, match=f"run-config rate={value!r}: expected a number > 0$"):
        number({"rate": value}, "rate", above=0)


def test_a_choice_is_one_of_the_allowed_words():
    config = {"solver": "newton"}
    assert choice(config, "solver", ("sgd", "newton")) == "newton"
    with pytest.raises(
        ValueError, match=r"run-config solver='newton': expected one of sgd, lbfgs$"
    ):
        choice(config, "solver", ("sgd", "lbfgs"))


@pytest.mark.parametrize("value", ["", "SGD", 1, True])
def test_a_choice_that_only_looks_right_is_refused(value):
    with pytest.raises(ValueError, match="run-config solver="):
        choice({"solver": value}, "solver", ("sgd", "newton"))


def test_a_number_of_nodes_that_is_none_is_refused_by_name():
    assert num_nodes({"rounds": 5}) is None
    assert num_nodes({"clients": 6, "clients-per-node": 3}) == 2
    with pytest.raises(UnfitSetting, match="num-silos='5': expected an integer"):
        num_nodes({"num-silos": "5"})
    assert num_nodes({"clients": 6, "clients-per-node": 0}) == 6
    with pytest.raises(UnfitSetting, match="clients-per-node=-1: expected an integer >= 0"):
        num_nodes({"clients": 6, "clients-per-node": -1})
    with pytest.raises(UnfitSetting, match="clients-per-node=4: expected .* divides clients=6"):
        num_nodes({"clients": 6, "clients-per-node": 4})
