"""Next-token loss and metrics: masks, and texts that say nothing of one another."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax

from flower_ext_pretrained.next_token import (
    IGNORED,
    LanguageModel,
    exact_match,
    next_token_loss,
    perplexity,
    token_accuracy,
)


class Bigrams(nn.Module):
    """A causal model that looks at the last token alone."""

    def __init__(self, vocabulary=7, dtype=torch.float32):
        super().__init__()
        table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.table = nn.Embedding.from_pretrained(table.to(dtype), freeze=False)

    def forward(self, input_ids, use_cache):
        assert not use_cache
        return SimpleNamespace(logits=self.table(input_ids))


def texts(count=40, tokens=6):
    ids = torch.randint(7, (count, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 0] = IGNORED
    labels[1, :4] = IGNORED  # a prompt
    labels[2, 3:] = IGNORED  # padding
    labels[3] = IGNORED
    return ids, labels


def plain(model, ids, labels):
    """Return loss, hit and text of each counted token, one by one."""
    rows = []
    for text, (row, wanted) in enumerate(zip(ids.tolist(), labels.tolist(), strict=True)):
        for place in range(1, len(row)):
            if wanted[place] != IGNORED:
                logits = model.table.weight[row[place - 1]]
                loss = -float(log_softmax(logits, 0)[wanted[place]])
                rows.append((text, loss, int(logits.argmax()) == wanted[place]))
    return rows


def test_scores_are_those_of_a_plain_loop_over_tokens():
    model, (ids, labels) = Bigrams(), texts()
    with torch.no_grad():
        scores = LanguageModel(model)(ids, labels)
    rows = plain(model, ids, labels)
    by_text = {text: [row for row in rows if row[0] == text] for text in range(len(ids))}
    means = [sum(r[1] for r in part) / max(1, len(part)) for part in by_text.values()]
    assert float(next_token_loss(scores, labels)) == pytest.approx(sum(means) / len(ids), rel=1e-5)
    mean = sum(loss for _, loss, _ in rows) / len(rows)
    assert perplexity(scores, labels) == pytest.approx(math.exp(mean), rel=1e-5)
    hits = [hit for *_, hit in rows]
    assert token_accuracy(scores, labels) == pytest.approx(sum(hits) / len(hits))
    matches = [all(hit for *_, hit in part) for part in by_text.values() if part]
    assert exact_match(scores, labels) == pytest.approx(sum(matches) / len(matches))


def test_scores_are_the_same_with_and_without_gradients():
    model, (ids, labels) = LanguageModel(Bigrams()), texts()
    with_gradients = model(ids, labels)
    with torch.no_grad():
        without = model(ids, labels)
    for name, value in with_gradients.items():
        torch.testing.assert_close(value.detach(), without[name])


def test_one_text_changes_no_other_text_s_gradient():
    model, (ids, labels) = LanguageModel(Bigrams()), texts(4)
    other = labels.clone()
    other[0] = IGNORED

    def gradient(labels):
        (slope,) = torch.autograd.grad(
            next_token_loss(model(ids, labels), labels), model.parameters()
        )
        return slope

    alone = next_token_loss(model(ids[:1], labels[:1]), labels[:1]) / 4
    (difference,) = torch.autograd.grad(alone, model.parameters())
    torch.testing.assert_close(gradient(labels) - gradient(other), difference)


def test_texts_whose_labels_are_all_ignored_move_nothing_and_have_no_scores():
    model, (ids, labels) = LanguageModel(Bigrams()), texts()
    labels = torch.full_like(labels, IGNORED)
    scores = model(ids, labels)
    loss = next_token_loss(scores, labels)
    (slope,) = torch.autograd.grad(loss, model.parameters())
    assert float(loss) == 0
    assert not slope.any()
    for metric in (perplexity, token_accuracy, exact_match):
        assert math.isnan(metric(scores, labels))


def test_a_perplexity_beyond_all_numbers_is_no_score():
    labels = torch.ones(1, 2, dtype=torch.int64)
    assert math.isnan(perplexity({"losses": torch.tensor([[800.0]])}, labels))
    assert math.isnan(perplexity({"losses": torch.tensor([[math.nan]])}, labels))


def test_scores_of_a_model_in_half_precision_are_in_single_precision():
    ids, labels = texts()
    half = LanguageModel(Bigrams(dtype=torch.bfloat16))
    scores = half(ids, labels)
    assert scores["losses"].dtype == torch.float32
    expected = cross_entropy(half.model.table.weight[ids[0, :1]].float(), ids[0, 1:2])
    assert float(scores["losses"][0, 0]) == pytest.approx(float(expected), rel=1e-6)
