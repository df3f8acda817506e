"""DP-SGD of Hugging Face's models, whole and with LoRA, in one pass of padded texts."""

import math
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient
from tests.support.grids import grid
from tests.support.jobs import problem

# Imported where it is used: each worker of pytest collects all modules, and one runs these tests.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs transformers and peft")

WORDS, LENGTH = 50, 12


def bert(attention, dropout):
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(
        vocab_size=WORDS,
        num_hidden_layers=1,
        max_position_embeddings=LENGTH,
        attn_implementation=attention,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        **sizes,
    )
    return transformers.BertForSequenceClassification(config), ["query", "value"]


def gpt2(attention, dropout):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=LENGTH,
        attn_implementation=attention,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        num_labels=3,
        pad_token_id=0,
    )
    return transformers.GPT2ForSequenceClassification(config), ["c_attn"]


@cache  # trials of a task count for all tests of it
def task_of(model, attention, lora, dropout=0.0):
    def build():
        torch.manual_seed(0)
        made, layers = model(attention, dropout)
        if not lora:
            return made
        import peft

        adapters = peft.LoraConfig(
            task_type="SEQ_CLS", r=3, lora_dropout=dropout, target_modules=layers
        )
        return peft.get_peft_model(made, adapters)

    return problem(build, loss)


def loss(outputs, targets):
    """A loss in which a text without a share has no gradient, but passes with the others."""
    losses = cross_entropy(outputs.logits, targets["label"], reduction="none")
    return (losses * targets["share"]).mean()


def texts(count=20, whole=()):
    """Return texts with padding, except for those in ``whole``."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, LENGTH, (count, 1), generator=draw)
    for row in whole:
        lengths[row] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    words = torch.randint(1, WORDS, (count, LENGTH), generator=draw) * mask
    labels = torch.randint(3, (count,), generator=draw)
    targets = {"label": labels, "share": torch.ones(count)}
    return Examples({"input_ids": words, "attention_mask": mask}, targets)


def moved(params):
    """LoRA begins at zero, so the gradients below it do, too."""
    draw = torch.Generator().manual_seed(3)
    return {name: p + 0.05 * torch.randn(p.shape, generator=draw) for name, p in params.items()}


CASES = [(bert, "sdpa", True), (bert, "eager", False), (gpt2, "eager", True)]
"""Each model, attention and way to train, and each pair of them but GPT-2 without LoRA."""


@pytest.mark.parametrize(
    ("model", "attention", "lora"), grid(CASES, lambda case: case == (bert, "sdpa", True))
)
def test_texts_pass_at_once_and_each_has_a_separate_gradient(model, attention, lora):
    task, data = task_of(model, attention, lora), texts(whole=[1, 4])
    params = moved(task.initial_params(1))

    def found(in_one_pass):
        gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
        if not in_one_pass:
            gradient.way = "one by one"
        summed = gradient(params, data.features, data.targets)
        assert (gradient.way == "in one pass") == in_one_pass
        return summed

    ours, theirs = found(True), found(False)
    largest = max(float(part.abs().max()) for part in theirs.values())
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.full
@pytest.mark.parametrize(("model", "attention"), [(bert, "eager"), (gpt2, "sdpa")])
def test_dropout_does_not_hide_that_texts_are_distinguished(model, attention):
    task, data = task_of(model, attention, True, dropout=0.1), texts(5)
    params = task.initial_params(1)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
    gradient(params, data.features, data.targets)
    assert gradient.way == "in one pass"


@pytest.mark.parametrize(
    ("model", "attention", "lora"), grid(CASES, lambda case: case == (bert, "sdpa", True))
)
def test_a_texts_padding_and_invalid_words_move_no_other_by_a_bit(model, attention, lora):
    """Other texts hide nothing; this one counts as zero, because its gradient is not finite."""
    task = task_of(model, attention, lora)
    params = moved(task.initial_params(1))
    others = [row for row in range(20) if row != 3]

    def found(data, share=math.nan, word=None):
        data.targets["share"][3] = share
        if word is not None:
            data.features["input_ids"][3, 0] = word
        gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
        summed = gradient(params, data.features, data.targets)
        assert gradient.way == "in one pass"
        return summed

    padded = found(texts(whole=others))
    for other in (found(texts(whole=range(20))), found(texts(whole=others), 1.0, WORDS)):
        for name in params:
            assert torch.equal(padded[name], other[name])
    assert any(part.any() for part in padded.values())
