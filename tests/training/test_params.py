import pytest
import torch

from flower_ext.training import matches, split

MODEL = {
    "extractor.weight": torch.zeros(2),
    "head.weight": torch.zeros(2),
    "head.bias": torch.zeros(1),
    "header.weight": torch.zeros(1),
}


def test_split_goes_by_module_not_by_letters():
    shared, personal = split(MODEL, ["head"])
    assert set(shared) == {"extractor.weight", "header.weight"}
    assert set(personal) == {"head.weight", "head.bias"}


def test_a_prefix_that_names_nothing_is_an_error_that_lists_the_modules():
    with pytest.raises(ValueError, match="'classifier' names no parameter.*extractor"):
        split(MODEL, ["classifier"])


def test_nothing_left_to_share_is_an_error():
    with pytest.raises(ValueError, match="leaves no parameter"):
        split(MODEL, ["extractor", "head", "header"])


def test_a_star_stands_for_any_part_of_a_name():
    model = {f"base.{layer}.lora_{part}.default.weight" for layer in (0, 1) for part in "AB"}
    found = {name for name in model if matches(name, ["*.lora_B"])}
    assert found == {"base.0.lora_B.default.weight", "base.1.lora_B.default.weight"}
    assert matches("base.classifier.bias", ["*.classifier"])
    assert not matches("base.classifiers.bias", ["*.classifier"])
    with pytest.raises(ValueError, match=r"'\*\.lora_C' names no parameter"):
        split(MODEL, ["*.lora_C"])


def test_a_single_parameter_may_be_named():
    assert matches("head.bias", ["head.bias"])
    assert not matches("head.weight", ["head.bias"])
