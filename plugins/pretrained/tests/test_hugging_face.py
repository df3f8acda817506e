"""Pretrained causal models and LoRA: what would train on noise is refused by name."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from flower_ext.training import Task
from flower_ext_pretrained.hugging_face import causal_model, pretrained, with_lora
from tests.support.pretrained import save_causal


@pytest.fixture
def base(tmp_path):
    return str(save_causal(tmp_path / "base"))


def lora(folder, **changes):
    return with_lora(causal_model(folder, setting="base"), **{"rank": 2, "only_b": True, **changes})


def test_only_b_trains_in_single_precision_on_a_base_in_half_precision(tmp_path):
    folder = str(save_causal(tmp_path / "half", dtype=torch.bfloat16))
    task = Task(model=lambda: lora(folder), data=lambda client: None)
    assert {array.dtype for array in task.template.values()} == {torch.float32}
    assert all(".lora_B." in name for name in task.shapes)
    frozen = task.factory.facts.frozen
    assert {w.dtype for n, w in frozen.items() if "lora" not in n} == {torch.bfloat16}
    assert any(w.any() for n, w in frozen.items() if ".lora_A." in n)


def test_both_matrices_train_if_asked(base):
    names = Task(model=lambda: lora(base, only_b=False), data=lambda client: None).shapes
    assert {name.split(".")[-3] for name in names} == {"lora_A", "lora_B"}


def test_changes_of_a_model_leave_the_next_one_as_it_was(base):
    first = causal_model(base, setting="base")
    with torch.no_grad():
        first.lm_head.weight.zero_()
    assert causal_model(base, setting="base").lm_head.weight.any()


def test_a_head_that_the_files_lack_is_refused(tmp_path):
    folder = save_causal(tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["embed_out.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"base='.*headless': its files lack lm_head\.weight"):
        causal_model(str(folder), setting="base")


def test_a_tied_head_needs_no_separate_weight(tmp_path):
    folder = save_causal(tmp_path / "tied", tie_word_embeddings=True)
    assert "embed_out.weight" not in load_file(folder / "model.safetensors")
    causal_model(str(folder), setting="base")


@pytest.mark.parametrize("targets", ["lm_head", "lm_head,dense"])
def test_an_adapter_on_a_tied_weight_is_refused(targets, tmp_path):
    folder = str(save_causal(tmp_path / "tied", tie_word_embeddings=True))
    with pytest.raises(
        ValueError, match=f"LoRA targets='{targets}': leave out '{targets.split(',')[0]}'"
    ):
        lora(folder, targets=targets)


@pytest.mark.parametrize("targets", ["q_proj", "dense,q_proj", "embed_in,dense", ""])
def test_each_target_has_to_name_a_layer(targets, base):
    with pytest.raises(ValueError, match="names no linear layer.*dense_4h_to_h.*query_key_value"):
        lora(base, targets=targets)


def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ValueError, match="base='.*nowhere'.*If you are offline, name a local folder"
    ):
        causal_model(str(tmp_path / "nowhere"), setting="base")


def test_everything_frozen_is_refused(base):
    task = Task(
        model=lambda: causal_model(base, setting="base").requires_grad_(False),
        data=lambda client: None,
    )
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        task.initial_params(0)


def test_a_trainable_name_that_matches_no_adapter_is_refused(base):
    task = Task(model=lambda: lora(base), data=lambda client: None, trainable=("*.lora_C",))
    with pytest.raises(ValueError, match=r"trainable='\*\.lora_C' names no parameter"):
        task.initial_params(0)


@pytest.mark.parametrize(
    ("library", "call"),
    [
        ("transformers", lambda: pretrained("AutoConfig", "no-folder", setting="base")),
        ("peft", lambda: with_lora(torch.nn.Linear(2, 2), rank=1, only_b=True)),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_has_it(library, call, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    advice = r"pip install 'flower-ext-pretrained\[text\]', or './plugins/pretrained\[text\]' in"
    with pytest.raises(ValueError, match=f"{library} is not installed: {advice}"):
        call()
