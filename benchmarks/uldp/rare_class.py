"""Metrics of models on data of which nearly all records are of one class."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.runs import app_module, mean_and_std
from flower_ext.data import Examples
from flower_ext.metrics import average_precision, roc_auc
from flower_ext.runs import RunDirectory
from flower_ext.training.models import build

RARE_CLASS = ("balanced accuracy", "ROC-AUC", "average precision")
"""Names of the metrics. A constant score has 0.5, 0.5 and the share of the rare class."""


def rare_class_metrics(run: RunDirectory) -> dict[str, float]:
    """Return `RARE_CLASS` of the last model on all silos' test records."""
    config = run.config
    test = _test_examples(str(config["dataset"]), str(config["data-folder"]), int(config["seed"]))
    described = app_module("uldp-fl", "silos").describe_silos(str(config["dataset"]))
    model = build(described.model, num_classes=2)
    model.load_state_dict(load_file(run.path / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        outputs = model(test.features)
    right = outputs.argmax(1) == test.targets
    recalls = [float(right[test.targets == label].double().mean()) for label in (0, 1)]
    scores = (
        sum(recalls) / 2,
        roc_auc(outputs, test.targets),
        average_precision(outputs, test.targets),
    )
    return dict(zip(RARE_CLASS, scores, strict=True))


def rare_class_cells(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the mean and deviation of each metric over runs."""
    scores = [rare_class_metrics(run) for run in runs]
    return [mean_and_std([score[name] for score in scores]) for name in RARE_CLASS]


@cache
def _test_examples(dataset: str, folder: str, seed: int) -> Examples:
    load_silos = app_module("uldp-fl", "silos").load_silos
    tests = [silo.test for silo in load_silos(dataset, Path(folder) if folder else None, seed=seed)]
    return Examples(
        torch.cat([test.features for test in tests]), torch.cat([test.targets for test in tests])
    )
