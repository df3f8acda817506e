"""Small transformers that classify texts of 64 words, or continue texts of 64 bytes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS, LAYERS, CLASSES = 2_000, 64, 64, 4, 2, 10
BYTES = 259


class Encoder(nn.Module):
    """Attention and two dense layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dense, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            layer(normed).view(len(x), LENGTH, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(len(x), LENGTH, WIDTH))
        out: Tensor = x + self.back(functional.gelu(self.dense(self.between(x))))
        return out


class Transformer(nn.Module):
    """Embeddings of words and places, encoders, and a linear head on their mean output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoders = nn.Sequential(*(Encoder() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=x.device).repeat(len(x), 1)  # as Opacus wants them
        encoded: Tensor = self.encoders(self.words(x) + self.places(places)).mean(dim=1)
        out: Tensor = self.head(encoded)
        return out


class Adapted(nn.Module):
    """Hugging Face's BERT of that size with LoRA; it takes words and masks, and returns logits."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import BertConfig, BertForSequenceClassification

        sizes: Any = BertConfig(  # type: ignore[call-arg, unused-ignore]
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        adapters = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
        self.model = get_peft_model(BertForSequenceClassification(sizes), adapters)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=words, attention_mask=mask).logits
        return out


class Causal(nn.Module):
    """The tiny base model of ``apps/private-lm``, or a larger one; logits (n, bytes, places)."""

    def __init__(
        self, rank: int = 0, *, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS
    ) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        from flower_ext_pretrained.hugging_face import with_lora

        sizes: Any = GPTNeoXConfig(  # type: ignore[call-arg, unused-ignore]
            vocab_size=BYTES,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=LENGTH,
        )
        model = GPTNeoXForCausalLM(sizes)
        self.model = with_lora(model, rank=rank, only_b=True) if rank else model

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].mT
        return out


def tokens(count: int) -> Tensor:
    """Return random texts of bytes."""
    return texts(count) % BYTES


def texts(count: int) -> Tensor:
    """Return random texts of words."""
    return torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def padded_texts(count: int) -> tuple[Tensor, Tensor]:
    """Return the words and masks of random texts with at least 8 words."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, LENGTH + 1, (count, 1), generator=draw)
    mask = (torch.arange(LENGTH) < lengths).long()
    return texts(count) * mask, mask
