"""Patterns name parameters by their modules."""

import pytest

from flower_ext.training.params import matches, require_modules

MODEL = ["extractor.weight", "head.weight", "head.bias", "header.weight"]


def test_a_pattern_goes_by_module_not_by_letters():
    assert {name for name in MODEL if matches(name, ["head"])} == {"head.weight", "head.bias"}


def test_a_prefix_that_names_nothing_is_an_error_that_lists_the_modules():
    with pytest.raises(ValueError, match="'classifier' names no parameter.*extractor"):
        require_modules("personal", ["classifier"], MODEL)


def test_a_star_stands_for_any_part_of_a_name():
    model = {f"base.{layer}.lora_{part}.default.weight" for layer in (0, 1) for part in "AB"}
    matched = {name for name in model if matches(name, ["*.lora_B"])}
    assert matched == {"base.0.lora_B.default.weight", "base.1.lora_B.default.weight"}
    assert matches("base.classifier.bias", ["*.classifier"])
    assert not matches("base.classifiers.bias", ["*.classifier"])
    with pytest.raises(ValueError, match=r"'\*\.lora_C' names no parameter"):
        require_modules("personal", ["*.lora_C"], model)


def test_a_single_parameter_may_be_named():
    assert matches("head.bias", ["head.bias"])
    assert not matches("head.weight", ["head.bias"])
