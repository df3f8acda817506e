"""Settings are declared once; a value that does not fit, or a wrong name, is refused by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from flower_ext.runs.settings import (
    AbsolutePath,
    Count,
    Fraction,
    Positive,
    Settings,
    UnfitSetting,
    absolute_path,
    changed_settings,
    declarations,
    num_nodes,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class Some(Settings):
    switch: bool = setting("a switch")
    count: Count = setting("a count")
    any_rate: Positive = setting("a rate")
    word: str = setting("a word")
    solver: Literal["sgd", "newton"] = setting("a choice")
    share: Fraction = setting("a share", default=1.0)
    folder: AbsolutePath = setting("a folder", default="")
    target: Positive | None = setting("may be absent", default=None)


CONFIG = {"switch": True, "count": 3, "any-rate": 0.5, "word": "", "solver": "newton"}


def test_settings_are_read_as_what_they_are():
    settings = Some.of(CONFIG)
    assert (settings.switch, settings.count, settings.any_rate) == (True, 3, 0.5)
    assert (settings.word, settings.share, settings.target) == ("", 1.0, None)
    assert hash(settings) == hash(Some.of(dict(CONFIG)))


def test_a_number_without_a_decimal_point_is_a_number():
    assert Some.of({**CONFIG, "any-rate": 2}).any_rate == 2


def test_declarations_hold_choices_ranges_and_meanings():
    declared = declarations(Some)
    assert declared["solver"].choices == ("sgd", "newton")
    assert declared["any_rate"].name == "any-rate"
    assert declared["any_rate"].meaning == "a rate"
    assert declared["target"].rule.expected == "a finite number > 0"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("switch", "false", "true or false"),
        ("switch", 3, "true or false"),
        ("count", "2", "an integer >= 1"),
        ("count", 0.5, "an integer >= 1"),
        ("count", True, "an integer >= 1"),
        ("count", 0, "an integer >= 1"),
        ("any-rate", "2", "a finite number > 0"),
        ("any-rate", True, "a finite number > 0"),
        ("any-rate", 0, "a finite number > 0"),
        ("any-rate", -1, "a finite number > 0"),
        ("any-rate", float("nan"), "a finite number > 0"),
        ("any-rate", float("inf"), "a finite number > 0"),
        ("share", 1.5, r"a number in \(0, 1\]"),
        ("target", 0.0, "a finite number > 0"),
        ("word", 3, "a text"),
        ("solver", "", "one of sgd, newton"),
        ("solver", "SGD", "one of sgd, newton"),
        ("solver", 1, "one of sgd, newton"),
        ("solver", True, "one of sgd, newton"),
        ("folder", "a", "an absolute path"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name, value, expected):
    with pytest.raises(UnfitSetting, match=f"^run-config {name}={value!r}: expected {expected}$"):
        Some.of({**CONFIG, name: value})


def test_a_value_is_refused_at_construction_too():
    with pytest.raises(UnfitSetting, match="run-config any-rate=-1: expected"):
        Some(switch=True, count=1, any_rate=-1, word="", solver="sgd")


def test_a_missing_setting_is_named_with_where_to_add_it():
    without = {name: value for name, value in CONFIG.items() if name != "solver"}
    message = (
        r"^run-config has no solver: expected one of sgd, newton; add it to \[tool.flwr.app.con"
    )
    with pytest.raises(UnfitSetting, match=message):
        Some.of(without)


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    with pytest.raises(UnfitSetting, match=r"^run-config cuont: no such setting; did you mean cou"):
        Some.of({**CONFIG, "cuont": 2})
    with pytest.raises(UnfitSetting, match=r"zzz: no such setting; expected one of any-rate, coun"):
        Some.of({**CONFIG, "zzz": 2})


def test_a_path_is_absolute_or_empty():
    assert absolute_path("") is None
    assert absolute_path("/a/b") == Path("/a/b")
    assert absolute_path("~/a") == Path.home() / "a"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("switch", "true", True), ("count", "2", 2), ("any_rate", "2", 2.0), ("word", "2", "2")],
)
def test_a_command_lines_text_is_read_by_its_settings_type(name, text, value):
    parsed = declarations(Some)[name].parse(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(("name", "text"), [("switch", "yes"), ("count", "2.5"), ("solver", "x")])
def test_a_text_that_is_no_such_value_is_refused(name, text):
    with pytest.raises(UnfitSetting, match=f"^setting {name}='{text}': expected"):
        declarations(Some)[name].parse(text)


def test_a_number_of_nodes_that_is_none_is_refused_by_name():
    assert num_nodes({"rounds": 5}) is None
    assert num_nodes({"clients": 6, "clients-per-node": 3}) == 2
    for config in ({"num-silos": "5"}, {"clients": 0}):
        with pytest.raises(UnfitSetting, match="a multiple of clients-per-node"):
            num_nodes(config)
    assert num_nodes({"clients": 6, "clients-per-node": 0}) == 6
    for per_node in (-1, 4):
        with pytest.raises(UnfitSetting, match=f"clients=6 with clients-per-node={per_node}: exp"):
            num_nodes({"clients": 6, "clients-per-node": per_node})


@pytest.mark.parametrize("name", ["clients", "num-silos"])
def test_a_secure_sum_of_too_few_is_refused_before_anything_starts(name):
    assert num_nodes({name: 3, "aggregation": "secure"}) == 3
    assert num_nodes({name: 2, "aggregation": "plain"}) == 2
    with pytest.raises(UnfitSetting, match=f"{name}=2 with aggregation='secure': .* at least 3"):
        num_nodes({name: 2, "aggregation": "secure"})


def test_changed_settings_have_both_values_except_those_that_may_differ():
    earlier = {"count": 1, "dropped": 3, "timeout": 5, "same": "x"}
    config = {"count": 2, "timeout": 6, "same": "x", "gained": 4, "off": 0, "empty": ""}
    assert changed_settings(earlier, config, free={"timeout"}) == {
        "count": (1, 2),
        "gained": (None, 4),
    }
    assert changed_settings({"switch": True}, {"switch": False}) == {"switch": (True, False)}
