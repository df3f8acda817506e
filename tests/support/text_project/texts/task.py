"""The learning problem: rows of a file with a text and a class, and a model with adapters."""

import csv
from functools import cache, partial
from pathlib import Path

import torch
from flwr.app import Context
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flower_ext.data import ClientData, Examples
from flower_ext.federation import node_settings
from flower_ext.training import Task, accuracy
from texts.settings import Settings


def task_of(context: Context) -> Task:
    settings = node_settings(Settings, context)
    return Task(
        model=partial(build, settings.base),
        data=partial(data, settings.base, settings.texts, settings.clients),
        loss=lambda outputs, labels: cross_entropy(outputs.logits, labels),
        metrics={"accuracy": lambda outputs, labels: accuracy(outputs.logits, labels)},
    )


def build(base: str) -> torch.nn.Module:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return get_peft_model(model, lora)


@cache
def data(base: str, path: str, clients: int, client: int) -> ClientData:
    rows = [*csv.DictReader(Path(path).read_text().splitlines())][client::clients]
    words = AutoTokenizer.from_pretrained(base)(
        [row["text"] for row in rows], padding="max_length", max_length=16, return_tensors="pt"
    )
    labels = torch.tensor([int(row["label"]) for row in rows])
    everything = Examples({name: words[name] for name in ("input_ids", "attention_mask")}, labels)
    test = len(rows) // 4
    return ClientData(
        train=everything.subset(range(test, len(rows))), test=everything.subset(range(test))
    )
