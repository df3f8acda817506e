"""Layers whose per-example gradients come from Opacus; `test_dp_sgd` compares more layers."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient
from tests.support.grids import grid
from tests.support.jobs import problem
from tests.support.reference.clipped_gradient import by_loop

WORDS = 11


class Words(nn.Module):
    """The mean of a text's words."""

    def __init__(self, **settings):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4, **settings), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)).mean(dim=1))


class Bag(nn.Module):
    """The same in one layer, which gets the start of each text."""

    def __init__(self, **settings):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(WORDS, 4, mode="sum", **settings), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x.flatten(), torch.arange(0, x.numel(), x.shape[1])))


class Placed(Words):
    """Words with positions, of which there are as many as the trial has examples."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(3, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x) + self.places(torch.arange(3))).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(5, 3)
        self.steps = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        return self.head(self.steps(self.words(x))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.words(x)
        return self.head(self.attention(x, x, x)[0].mean(dim=1))


def texts(length, count=70):
    draw = torch.Generator().manual_seed(length)
    return Examples(
        features=torch.randint(WORDS, (count, length), generator=draw),
        targets=torch.randint(3, (count,), generator=draw),
    )


def clipped(build, data, clipping_norm=0.3):
    task = problem(build)
    params = task.initial_params(1)
    gradient = ClippedGradient(task, list(params), clipping_norm=clipping_norm)
    return gradient, params, gradient(params, data.features, data.targets)


def assert_is_like_a_loop(build, data, *, in_one_pass, clipping_norm=0.3):
    """Assert the way that is taken, and that the gradient equals that of a plain loop."""
    gradient, params, ours = clipped(build, data, clipping_norm)
    assert (gradient.way == "in one pass") == in_one_pass
    theirs = by_loop(gradient.task, params, data, clipping_norm, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5 * len(data))


@pytest.mark.parametrize(
    ("length", "padding", "clipping_norm"),
    grid(
        product([1, 6, WORDS + 1], [None, 0, 7, -1], [0.3, 1e6]),
        {(1, None, 0.3), (6, 0, 0.3), (6, 7, 1e6), (WORDS + 1, -1, 0.3)}.__contains__,
    ),
)
def test_embeddings_pass_once_and_padding_has_no_gradient(length, padding, clipping_norm):
    """A trial looks up only words 0 and 1, so it cannot detect a padding word in between."""
    assert_is_like_a_loop(
        lambda: Words(padding_idx=padding),
        texts(length),
        in_one_pass=True,
        clipping_norm=clipping_norm,
    )


@pytest.mark.parametrize("build", [lambda: Words(scale_grad_by_freq=True), Bag])
def test_a_layer_that_counts_words_unlike_opacus_takes_another_way(build):
    assert_is_like_a_loop(build, texts(6), in_one_pass=False)


def test_an_embedding_that_sees_no_examples_is_in_no_one_pass():
    assert_is_like_a_loop(Placed, texts(3), in_one_pass=False)


def test_sparse_gradients_equal_dense_ones():
    _, _, usual = clipped(Words, texts(6))
    gradient, _, ours = clipped(lambda: Words(sparse=True), texts(6))
    assert gradient.way == "in one pass"
    for name, expected in usual.items():
        assert torch.equal(ours[name], expected)


@pytest.mark.parametrize("build", [Recurrent, Attentive])
def test_layers_that_opacus_would_replace_train_as_they_are(build):
    assert_is_like_a_loop(build, texts(6, count=9), in_one_pass=False)


def test_a_text_with_an_unknown_word_counts_as_zero():
    data = texts(6)
    data.targets[3] = 7  # another error, which keeps the shapes
    _, _, without = clipped(Words, data)
    data.targets[3], data.features[3, 2] = 1, WORDS
    gradient, params, ours = clipped(Words, data)
    assert gradient.way == "in one pass"
    for name in params:
        assert ours[name].any()
        assert torch.equal(ours[name], without[name])


@pytest.mark.parametrize("build", [Words, Bag])
def test_an_embedding_that_rewrites_its_rows_is_refused_by_name(build):
    with pytest.raises(ValueError, match=r"'words' has max_norm=1.0: expected None"):
        clipped(lambda: build(max_norm=1.0), texts(6))


@pytest.mark.parametrize(
    "layer",
    [
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.Embedding(WORDS, 4, scale_grad_by_freq=True),
        nn.EmbeddingBag(WORDS, 4),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_a_trial_cannot_judge_never_train_in_one_pass(layer):
    names = [name for name, _ in layer.named_parameters()]
    gradient = ClippedGradient(problem(lambda: layer), names, clipping_norm=1.0)
    assert gradient.way != "in one pass"


@pytest.mark.parametrize(
    ("layout", "padding"),
    grid(
        product([torch.contiguous_format, torch.channels_last], ["same", "valid"]),
        {(torch.contiguous_format, "valid"), (torch.channels_last, "same")}.__contains__,
    ),
)
def test_strides_in_memory_change_no_gradient(padding, layout):
    """Opacus extracts patches by its own strides; convolutions may put channels last."""

    def build():
        return nn.Sequential(
            nn.Conv2d(4, 40, 3, padding=padding),
            nn.Conv2d(40, 33, 1, padding=padding),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(33, 3),
        )

    draw = torch.Generator().manual_seed(1)
    images = torch.randn(5, 4, 5, 5, generator=draw).contiguous(memory_format=layout)
    data = Examples(features=images, targets=torch.arange(5) % 3)
    assert_is_like_a_loop(build, data, in_one_pass=True)


@pytest.mark.full
def test_loading_opacus_leaves_the_root_logger_as_it_was():
    script = """
import logging, sys
from flower_ext.training.models.validation import opacus
root = logging.getLogger()
before = root.handlers[:], root.level
assert "opacus" not in sys.modules
opacus()
assert (root.handlers, root.level) == before, root.handlers
"""
    subprocess.run([sys.executable, "-c", script], check=True)
