"""Texts of a file that the user names, and the pretrained transformer that reads them.

The plug-in flower-ext-pretrained loads the transformer, and adds LoRA to it. It needs its extra
``text``.
"""

import csv
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from flower_ext.data import DataNotFound, Examples
from flower_ext.errors import InvalidValue
from flower_ext.runs.settings import UnfitSetting, absolute_path
from flower_ext.training.models import HeadedModel
from private_finetuning_app.settings import Settings


class Encoder(nn.Module):
    """A transformer whose last states are averaged over the words of a text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # it reads only the first token and is not used here
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return features (n, width), each row normalised, of token numbers (n, tokens)."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        present = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
        return layer_norm(mean, mean.shape[1:])


class HeadedEncoder(HeadedModel):
    """A head on an `Encoder`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        return self.head(self.extractor(input_ids, attention_mask))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A file of labelled texts, and the model that reads them."""

    file: Path
    labels: tuple[str, ...]
    model: str
    max_tokens: int
    lora_rank: int
    lora_only_b: bool

    headed = HeadedEncoder
    adapts_features = False  # LoRA lies within the transformer, so every step passes through it

    @classmethod
    def of(cls, settings: Settings) -> "Texts":
        """Return the file and model that the settings name."""
        file, model = absolute_path(settings.text_file), settings.text_model
        labels = tuple(filter(None, map(str.strip, settings.text_labels.split(","))))
        if file is None:
            raise UnfitSetting(
                "run-config text-file='': expected the absolute path of a CSV file with columns "
                "text and label"
            )
        if len(set(labels)) < max(2, len(labels)):
            raise UnfitSetting(
                f"run-config text-labels={','.join(labels)!r}: expected at least two different "
                "labels, separated by commas, for example 'negative,positive'; labels are not "
                "read from the file, because the number of classes would then reveal people's data"
            )
        if not model:
            raise UnfitSetting(
                "run-config text-model='': expected the absolute path of a folder with a model and "
                "its tokenizer, as save_pretrained writes them, or a name on the hub"
            )
        return cls(
            file=file,
            labels=labels,
            model=model,
            max_tokens=settings.max_tokens,
            lora_rank=settings.lora_rank,
            lora_only_b=settings.lora_only_b,
        )

    @property
    def num_classes(self) -> int:
        """Number of labels in the settings."""
        return len(self.labels)

    @property
    def width(self) -> int:
        """Number of features of a text."""
        return int(_loaded("AutoConfig", self.model).hidden_size)

    def pool(self) -> Examples:
        """Return, as token numbers, all texts that have one of ``labels``."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        rows = [row for row in _rows(self.file) if row[1] in numbers]
        if not rows:
            raise InvalidValue(
                f"text-file={str(self.file)!r}: none of its labels is one of "
                f"{', '.join(self.labels)}; name the labels of the file in text-labels"
            )
        texts, labels = zip(*rows, strict=True)
        tokenizer = _loaded("AutoTokenizer", self.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        words = tokenizer(
            list(texts),
            max_length=self.max_tokens,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        return Examples(
            {name: words[name] for name in ("input_ids", "attention_mask")},
            torch.tensor([numbers[label] for label in labels]),
        )

    def frozen(self) -> nn.Module:
        """Return the pretrained model, which turns texts into features."""
        return Encoder(deepcopy(_loaded("AutoModel", self.model, dtype=torch.float32)))

    def adapted(self) -> nn.Module:
        """Return the frozen model with trainable low-rank matrices B·A beside its linear layers.

        ``lora_only_b`` is explained in `with_lora`.
        """
        from flower_ext_pretrained.hugging_face import with_lora

        encoder = self.frozen()
        encoder.model = with_lora(encoder.model, rank=self.lora_rank, only_b=self.lora_only_b)
        return encoder

    def whole(self) -> nn.Module:
        """Return the pretrained model for training all of it."""
        return self.frozen()


@cache
def _rows(path: Path) -> list[tuple[str, str]]:
    """Return each text of a CSV file with its label."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [*csv.DictReader(stream)]
    except OSError as error:
        raise DataNotFound(f"text-file={str(path)!r}: {error.strerror}; name a CSV file") from error
    found = sorted(rows[0]) if rows else []
    if not {"text", "label"} <= set(found):
        raise InvalidValue(
            f"text-file={str(path)!r}: expected columns text and label in its first line, found "
            f"{found}"
        )
    return [(row["text"] or "", row["label"] or "") for row in rows]


def _loaded(kind: str, model: str, **options: Any) -> Any:
    """Return a part of the pretrained model, loaded once per process."""
    from flower_ext_pretrained.hugging_face import pretrained

    return pretrained(kind, model, setting="text-model", **options)
