"""On a GPU, a language model in half precision trains under a guarantee."""

import math
from dataclasses import replace

import pytest
import torch

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient, Job, LocalTraining, train, train_each
from flower_ext.training.trials.trainings import why_state_is_shared
from flower_ext_pretrained.hugging_face import with_lora
from flower_ext_pretrained.next_token import LanguageModel, next_token_loss
from tests.support.jobs import problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tiny_language_model():
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    model = transformers.GPTNeoXForCausalLM(config).to(torch.bfloat16)
    return LanguageModel(with_lora(model, rank=2, only_b=True, task_type="CAUSAL_LM"))


def texts(count):
    tokens = torch.randint(50, (count, 32), generator=torch.Generator().manual_seed(count))
    return Examples(features=(tokens, tokens), targets=tokens)


def test_a_language_model_in_half_precision_trains_under_a_guarantee():
    task = replace(problem(tiny_language_model, next_token_loss), device="cuda")
    assert why_state_is_shared(task, texts(5), train) is None
    jobs = [
        Job(
            params=task.initial_params(0),
            examples=texts(6),
            training=LocalTraining(epochs=1, batch_size=3, optimizer="AdamW", learning_rate=0.01),
            generator=torch.Generator().manual_seed(0),
        )
        for _ in range(2)
    ]
    one, _ = train_each(task, jobs, batch_invariant=True)
    assert all(value.isfinite().all() for value in one.values())
    names = list(one)
    moved = {name: value.cuda() for name, value in one.items()}
    tokens = texts(6).targets.cuda()
    gradient = ClippedGradient(task, names, clipping_norm=0.01)
    total = gradient(moved, (tokens, tokens), tokens)
    assert 0 < math.sqrt(sum(float(part.square().sum()) for part in total.values())) < 0.0601
