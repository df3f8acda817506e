"""A transformer of a few thousand numbers with its tokenizer, and labelled texts, in a folder."""

import csv
from pathlib import Path

import torch

WORDS = ["good", "fine", "kind", "bad", "poor", "cold", "tea", "coffee", "day", "night"]


def tiny_model(folder: Path, *, seed: int = 0) -> str:
    """Save a BERT and its tokenizer as a user would have them; return their folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def labelled_texts(folder: Path, count: int = 120) -> str:
    """Write a CSV file in which the second word tells the label."""
    path = folder / "texts.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for number in range(count):
            word, thing = WORDS[number % 6], WORDS[6 + number % 4]
            writer.writerow([f"{thing} {word}", "up" if number % 6 < 3 else "down"])
    return str(path)


def text_settings(folder: Path) -> dict[str, object]:
    """Return settings of `apps/private_finetuning` for these texts and this model."""
    return {
        "dataset": "text",
        "text-file": labelled_texts(folder),
        "text-model": tiny_model(folder),
        "examples": 0,
        "max-tokens": 4,
        "lora-rank": 4,
    }
