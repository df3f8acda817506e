"""A trial of the settings on public text, before the first round.

The trial detects settings under which the model would learn nothing. The server trains as a client
would, but on Python's documentation, which is public. It refuses adapters that get no gradient, and
warns of a clipping norm far above or below the norm of an update.
"""

import math
from logging import getLogger
from typing import Any

import torch

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation import configured
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.training import Job, Task, difference, train
from flower_ext_pretrained.hugging_face import pretrained
from private_lm_app.python_text import public_text
from private_lm_app.settings import Settings
from private_lm_app.texts import Text, encoded, padded

log = getLogger("flwr")

_TEXTS = 24
_FACTOR = 10.0
"""A clipping norm may be this many times smaller or larger than the norm of the trial's update."""


def try_on_public_text(settings: Settings, task: Task, base: str) -> None:
    """Train once on public text. Refuse the settings if the adapters diverge or do not move.

    Warn if the clipping norm is far above or below the norm of the update.

    Raises
    ------
    InvalidValue
        The update is zero or not finite.
    """
    norm = update_norm(settings, task, base)
    if norm == 0:
        raise InvalidValue(
            f"lora-targets={settings.lora_targets!r}, lora-rank={settings.lora_rank}: training on "
            "public text moves no adapter, so the run would only add noise; expected layers on "
            "which the loss depends"
        )
    if not norm < math.inf:
        raise InvalidValue(
            f"learning-rate={settings.learning_rate}: training on public text diverges; expected "
            "a smaller one"
        )
    if settings.method == "dp-fedavg" and settings.clipping == "fixed":
        clipping = settings.clipping_norm
        if not 1 / _FACTOR <= norm / clipping <= _FACTOR:
            why = "nearly all of it is cut off" if norm > clipping else "noise will drown it"
            log.warning(
                "clipping-norm=%g: the update of a training on public text has the norm %.2g, so "
                "%s; choose a norm near it, or clipping='adaptive'",
                *(clipping, norm, why),
            )


def update_norm(settings: Settings, task: Task, base: str) -> float:
    """Return the norm of the update of one local training on public text.

    The norm is infinite if the training diverges.
    """
    params = task.initial_params(settings.seed)
    job = Job(
        params=params,
        examples=public_examples(base, settings.max_tokens),
        training=configured.training(settings),
        generator=torch.Generator().manual_seed(0),
    )
    update = difference(train(task, job), params)
    finite = all(bool(part.isfinite().all()) for part in update.values())
    return l2_norm(update) if finite else math.inf


def public_examples(base: str, max_tokens: int) -> Examples:
    """Return the first windows of the public text."""
    tokenizer: Any = pretrained("AutoTokenizer", base, setting="base")
    text = public_text()[: 16 * max_tokens * _TEXTS]
    rows = [row[:2] for row in encoded(tokenizer, Text("", text, most=_TEXTS), max_tokens)]
    return padded(rows, tokenizer.pad_token_id or 0, max_tokens)
