"""DP-SGD of causal language models: embedding, attention, norms and adapters, text by text."""

import pytest
import torch

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient, Task
from flower_ext.training.dp.passes import Way
from flower_ext_pretrained.hugging_face import with_lora
from flower_ext_pretrained.next_token import IGNORED, LanguageModel, next_token_loss
from tests.support.grids import grid
from tests.support.reference.clipped_gradient import by_loop

SIZES = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def causal(kind, adapters):
    import transformers

    inner = {"n_inner": 16} if kind == "GPT2" else {"intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **inner, max_position_embeddings=16)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(
        config
    )
    return LanguageModel(with_lora(model, rank=2, only_b=False) if adapters else model)


def texts(count=7):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (count, 6), generator=draw)
    labels = ids.clone()
    labels[1, :4] = IGNORED
    labels[2] = IGNORED
    return Examples({"input_ids": ids, "labels": labels}, labels)


@pytest.mark.parametrize(
    ("kind", "adapters", "way"),
    grid(
        [
            ("GPTNeoX", False, Way.IN_ONE_PASS),
            ("GPTNeoX", True, Way.IN_ONE_PASS),
            ("Llama", False, Way.BY_VMAP),
            ("Llama", True, Way.IN_ONE_PASS),
            ("GPT2", False, Way.BY_VMAP),
            ("GPT2", True, Way.IN_ONE_PASS),
        ],
        lambda case: case[0] == "GPTNeoX" and not case[1],
    ),
)
def test_clipped_gradients_are_those_of_a_loop_over_texts(kind, adapters, way):
    torch.manual_seed(0)
    task = Task(
        model=lambda: causal(kind, adapters), data=lambda client: None, loss=next_token_loss
    )
    params = task.factory.like_initial(1)
    clipped = ClippedGradient(task, list(params), clipping_norm=0.5, batch_size=7)
    data = texts()
    summed = clipped(params, data.features, data.targets)
    # On some processors, one pass of Llama rounds more than its trial allows.
    assert clipped.way == way or (kind, clipped.way) == ("Llama", Way.BY_VMAP)
    expected = by_loop(task, params, data, clipping_norm=0.5, names=list(params))
    for name, value in expected.items():
        torch.testing.assert_close(summed[name], value, rtol=1e-4, atol=1e-5)
