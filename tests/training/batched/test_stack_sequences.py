"""Models of sequences: PyTorch's recurrent layers train one by one, and Opacus' in batches."""

from functools import partial

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient, Job
from flower_ext.training.batched.stack import jobs_that_fit
from tests.support.grids import grid
from tests.support.jobs import ALIKE, SGD, UNEVEN, one_by_one, problem, same, train_many, why_apart
from tests.support.reference.clipped_gradient import by_loop

RECURRENT = [nn.LSTM, nn.GRU, nn.RNN, DPLSTM, DPGRU, DPRNN]


class Sentences(nn.Module):
    """Words with padding, and the output of a recurrent layer at the last word."""

    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(11, 3, padding_idx=-4)  # counted from the end
        self.recurrent = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.recurrent(self.words(x))[0][:, -1])


def jobs(task, sizes):
    for client, size in enumerate(sizes):
        random = torch.Generator().manual_seed(client)
        x = torch.randint(11, (size, 6), generator=random)
        yield Job(
            params=task.initial_params(client),
            examples=Examples(x, torch.randint(3, (size,), generator=random)),
            training=SGD,
            generator=random,
        )


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(ALIKE, id="alike", marks=pytest.mark.full), pytest.param(UNEVEN, id="uneven")],
)
@pytest.mark.parametrize("kind", grid(RECURRENT, {nn.LSTM, DPLSTM, DPRNN}.__contains__))
def test_models_of_sequences_train_together_as_by_themselves(batched, kind, sizes):
    task = problem(partial(Sentences, kind))
    same(train_many(task, [*jobs(task, sizes)]), one_by_one(task, [*jobs(task, sizes)]))
    assert bool(batched) == (why_apart(task, [*jobs(task, sizes)]) is None)
    assert bool(batched) == (kind in (DPLSTM, DPGRU, DPRNN))


@pytest.mark.parametrize("clipping_norm", grid([0.1, 1e6], lambda norm: norm < 1))
@pytest.mark.parametrize("kind", grid(RECURRENT, {nn.LSTM, DPLSTM}.__contains__))
def test_each_record_of_sequences_has_a_separate_gradient_to_clip(kind, clipping_norm):
    task = problem(partial(Sentences, kind))
    (job,) = jobs(task, [9])
    names = list(job.params)
    gradient = ClippedGradient(task, names, clipping_norm=clipping_norm)
    ours = gradient(job.params, job.examples.features, job.examples.targets)
    theirs = by_loop(task, job.params, job.examples, clipping_norm, names)
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def test_long_sequences_take_more_memory():
    task = problem(partial(Sentences, DPGRU))
    (short,) = jobs(task, [8])
    words = short.examples.features
    long = Job(
        params=short.params,
        examples=Examples(words.repeat(1, 50), short.examples.targets),
        training=short.training,
        generator=short.generator,
    )
    few, many = jobs_that_fit(task, long, 2**24), jobs_that_fit(task, short, 2**24)
    assert many / 60 < few < many / 10
