"""A small saved text model with its tokenizer, as if pretrained by somebody else, and texts."""

import csv
from pathlib import Path

import torch

PLAIN = ("the", "film", "was", "plot", "score", "so")
TELLING = ("bad", "dull", "good", "great")
WORDS = (*PLAIN, *TELLING)


def save_pretrained(folder: Path, *, seed: int = 0) -> Path:
    """Write a one-layer BERT with the weights of ``seed``, and a tokenizer of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(("[PAD]", "[UNK]", *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_texts(path: Path, *, labels: tuple[str, str] = ("0", "1"), count: int) -> Path:
    """Write texts of three to six words; the last word decides the label, in equal shares."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for number in range(count):
            places = torch.randint(len(PLAIN), (5,), generator=generator).tolist()
            words = [PLAIN[place] for place in places[: 2 + number % 4]]
            which = places[0] % 2 + 2 * (number // 4 % 2)
            rows.writerow((" ".join([*words, TELLING[which]]), labels[which // 2]))
    return path


def project_settings(folder: Path, *, clients: int = 3) -> dict[str, object]:
    """Write model and texts, and return the settings of `apps.TEXTS` that name them."""
    return {
        "base": str(save_pretrained(folder / "base")),
        "texts": str(save_texts(folder / "texts.csv", count=20 * clients)),
        "clients": clients,
        "sampling": "everyone",
    }


def finetuning_settings(folder: Path) -> dict[str, object]:
    """Write model and texts; return the settings of `apps.PRIVATE_FINETUNING` that name them."""
    return {
        "dataset": "text",
        "text-model": str(save_pretrained(folder / "base")),
        "text-file": str(save_texts(folder / "texts.csv", labels=("down", "up"), count=120)),
        "text-labels": "down,up",
        "examples": 0,
        "max-tokens": 8,
        "lora-rank": 4,
    }


def save_causal(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config
) -> Path:
    """Write a one-layer GPT-NeoX with the weights of ``seed``, and a tokenizer of bytes."""
    from transformers import ByT5Tokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "rotary_pct": 1.0,
        "initializer_range": 0.2,
    }
    names = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, **names, **config}))
    model.to(dtype).save_pretrained(folder)
    return folder
