"""A tiny byte-level causal model, which the app trains on public text: for trials without files.

It is a GPT-NeoX (the architecture of Pythia) of 0.13 million parameters with the tokenizer of ByT5,
whose tokens are bytes. Training takes about a minute of one core. Training is not the same to the
last bit on other machines: to deploy, copy the folder of one machine to all others.
"""

import functools
import hashlib
import os
from logging import getLogger
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from private_lm_app.python_text import public_text

log = getLogger("flwr")

RECIPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "rotary_pct": 1.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
TARGETS = "lm_head,query_key_value,dense,dense_h_to_4h,dense_4h_to_h"
"""Layers with adapters: all linear layers, and the head, because code and prose differ in bytes.
"""
STEPS, BATCH, TOKENS, LEARNING_RATE = 600, 32, 64, 4e-3


def tiny_base(cache: Path | None, *, steps: int = STEPS) -> Path:
    """Return the folder of the tiny model and its tokenizer; train it if the cache lacks it."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flower-ext"
    folder = cache / f"private-lm-{_digest(steps)}"
    if not folder.is_dir():
        log.info("training the tiny base model once, on public text: %s", folder)
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=".private-lm-", dir=cache))
        _train(draft, steps)
        try:
            draft.rename(folder)  # whole or not at all
        except OSError:  # another process was faster
            rmtree(draft)
    return folder


@functools.cache
def _digest(steps: int) -> str:
    return hashlib.sha256(repr((RECIPE, steps, public_text())).encode()).hexdigest()[:12]


def _train(folder: Path, steps: int) -> None:
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    tokenizer.save_pretrained(folder)
    config = transformers.GPTNeoXConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **RECIPE,
    )
    ids = torch.tensor(tokenizer(public_text(), add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.GPTNeoXForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (BATCH,))]
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            loss = cross_entropy(logits.mT, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.save_pretrained(folder)
