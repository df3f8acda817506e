"""A small text model with its tokenizer, saved as one that somebody pretrained; and texts."""

import csv
from pathlib import Path

import torch

WORDS = ("the", "film", "was", "plot", "score", "good", "great", "bad", "dull", "not", "so")
PLEASING = ("good", "great")


def save_pretrained(folder: Path, *, seed: int = 0) -> Path:
    """Write a BERT of two layers, with the weights of ``seed``, and a tokenizer of `WORDS`."""
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
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_texts(path: Path, *, count: int, seed: int = 0) -> Path:
    """Write texts of four to eight words, and whether one of them pleases."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for _ in range(count):
            places = torch.randint(len(WORDS), (9,), generator=generator).tolist()
            text = [WORDS[place] for place in places[: 4 + places[0] % 5]]
            rows.writerow((" ".join(text), int(any(word in PLEASING for word in text))))
    return path


def text_settings(folder: Path, *, clients: int = 3) -> dict[str, object]:
    """Write both, and return the settings of `TEXTS` that name them."""
    return {
        "base": str(save_pretrained(folder / "base")),
        "texts": str(save_texts(folder / "texts.csv", count=20 * clients)),
        "clients": clients,
        "sampling": "everyone",
    }
