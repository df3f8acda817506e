"""Causal language models for a `Task`: a loss that predicts the next token, and metrics.

Labels (n, tokens) repeat the input tokens. A label of `IGNORED` excludes its token from the loss
and from all metrics. Use it for padding, and for prompts that the model need not learn to write.
Put padding after the text. There no earlier token attends to it, so no attention mask is needed.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Label of a token that counts in no loss and in no metric."""
_ROWS = 16
"""Number of texts whose logits an evaluation holds at once, because vocabularies are large."""

Scores = Mapping[str, Tensor]
"""``losses`` and ``hits``, each of shape (n, tokens - 1), for all tokens of a text but the first.

A loss is in nats. A hit is 1.0 if the model found the token most probable, and else 0.0. The loss
and the hit are 0 if the token's label is `IGNORED`.
"""


class LanguageModel(nn.Module):
    """A causal model that returns scores of tokens in place of its logits.

    Parameters
    ----------
    model : nn.Module
        Called as ``model(input_ids=..., use_cache=False)``, it returns an object whose ``logits``
        have the shape (n, tokens, vocabulary), as Transformers' ``…ForCausalLM`` do. Its numbers
        may be in half precision; scores are in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Scores:
        """Return `Scores` (n, tokens - 1) from token numbers (n, tokens) and labels (n, tokens)."""
        if torch.is_grad_enabled():
            return self._scores(input_ids, labels)
        pairs = zip(torch.split(input_ids, _ROWS), torch.split(labels, _ROWS), strict=True)
        parts = [self._scores(*pair) for pair in pairs]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _scores(self, input_ids: Tensor, labels: Tensor) -> Scores:
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
        following = labels[:, 1:]
        losses = cross_entropy(logits.mT, following, ignore_index=IGNORED, reduction="none")
        return {"losses": losses, "hits": (logits.argmax(dim=2) == following).to(losses.dtype)}


def next_token_loss(scores: Scores, labels: Tensor) -> Tensor:
    """Return the mean over texts of each text's mean loss per token, in nats.

    All texts have the same weight, so a text's gradient depends on no other text. If all labels of
    a text are `IGNORED`, its loss and its gradient are 0.
    """
    counted = _counted(labels)
    return (scores["losses"].sum(dim=1) / counted.sum(dim=1).clamp_min(1)).mean()


def perplexity(scores: Scores, labels: Tensor) -> float:
    """Return exp of the mean loss over all tokens that are not `IGNORED`; NaN if all are."""
    tokens = int(_counted(labels).sum())
    loss = float(scores["losses"].double().sum()) / tokens if tokens else math.nan
    return math.exp(loss) if loss < math.log(1e30) else math.nan


def token_accuracy(scores: Scores, labels: Tensor) -> float:
    """Return the fraction of tokens, without `IGNORED` ones, that the model finds most probable.

    The result is NaN if all tokens are `IGNORED`.
    """
    tokens = int(_counted(labels).sum())
    return float(scores["hits"].double().sum()) / tokens if tokens else math.nan


def exact_match(scores: Scores, labels: Tensor) -> float:
    """Return the fraction of texts in which the model finds every token most probable.

    Greedy generation after the prompt then writes exactly these tokens. `IGNORED` tokens do not
    count, and texts without other tokens are left out. The result is NaN if no text remains.
    """
    counts = _counted(labels).sum(dim=1)
    some = counts > 0
    matches = (scores["hits"].sum(dim=1) == counts)[some]
    return float(matches.double().mean()) if len(matches) else math.nan


def _counted(labels: Tensor) -> Tensor:
    return labels[:, 1:] != IGNORED
