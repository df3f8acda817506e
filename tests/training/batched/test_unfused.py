from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient, Job
from flower_ext.training.batched.batchable import why_apart
from flower_ext.training.batched.grouping import together
from flower_ext.training.batched.unfused import faster_alone, unfuse
from tests.support.jobs import ALIKE, SGD, UNEVEN, one_by_one, problem, same, train_many
from tests.support.reference.clipped_gradient import by_loop

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **more: nn.RNN(*args, nonlinearity="relu", **more),
}
SHAPES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "both ways": {"bidirectional": True},
    "two layers both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False},
}


def flat(outputs):
    output, last = outputs
    return [output, *(last if isinstance(last, tuple) else [last])]


@pytest.mark.parametrize("begins", ["at zero", "at given states"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_states_and_gradients_are_those_of_the_layer_itself(kind, shape, begins):
    torch.manual_seed(0)
    layer = KINDS[kind](3, 4, **SHAPES[shape])
    x = torch.randn(5, 6, 3, requires_grad=True)
    number = layer.num_layers * (1 + layer.bidirectional)
    shape_of_states = (number, 5 if layer.batch_first else 6, 4)
    states = [torch.randn(shape_of_states, requires_grad=True) for _ in range(1 + (kind == "lstm"))]
    if begins == "at zero":
        states, start = [], None
    else:
        start = tuple(states) if kind == "lstm" else states[0]
    ours = unfuse(deepcopy(layer))
    found, expected = flat(ours(x, start)), flat(layer(x, start))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    weights = [torch.randn_like(part) for part in expected]
    slopes = []
    for model, parts in ((ours, found), (layer, expected)):
        total = sum((w * part).sum() for w, part in zip(weights, parts, strict=True))
        inputs = [x, *model.parameters(), *states]
        slopes.append(torch.autograd.grad(total, inputs))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)


def test_padding_has_no_gradient_but_the_value_it_has():
    torch.manual_seed(0)
    layer = nn.Embedding(5, 3, padding_idx=-2)  # counted from the end
    with torch.no_grad():
        layer.weight.fill_(2.0)
    x = torch.tensor([[0, 3, 3, 1]])
    out = unfuse(layer)(x)
    assert torch.equal(out, torch.full((1, 4, 3), 2.0))
    out.sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]


class Odd(nn.LSTM):
    """A layer that is not PyTorch's own."""


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, proj_size=2),
        nn.GRU(3, 4, num_layers=2, dropout=0.1),
        Odd(3, 4),
        nn.Embedding(5, 3, padding_idx=0, max_norm=1.0),
        nn.Embedding(5, 3, padding_idx=0, scale_grad_by_freq=True),
        nn.Embedding(5, 3, padding_idx=0, sparse=True),
    ],
    ids=repr,
)
def test_an_unusual_layer_is_refused(layer):
    with pytest.raises(ValueError, match="has no form in steps"):
        unfuse(nn.Sequential(layer))


def test_sequences_of_several_lengths_are_refused():
    with pytest.raises(TypeError, match="sequences of one length"):
        unfuse(nn.GRU(3, 4))(pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))


class Sentences(nn.Module):
    """Words with padding, and the output of a recurrent layer at the last word."""

    kind = nn.LSTM

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 3, padding_idx=7)
        self.recurrent = self.kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        self.recurrent.flatten_parameters()
        return self.head(self.recurrent(self.words(x))[0][:, -1])


class Gated(Sentences):
    """The same with a GRU."""

    kind = nn.GRU


class Simple(Sentences):
    """The same with the simplest recurrent layer."""

    kind = nn.RNN


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


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("model", [Sentences, Gated, Simple])
def test_models_of_sequences_train_in_batches_as_by_themselves(batched, model, sizes):
    task = problem(model)
    assert why_apart(task, [*jobs(task, sizes)]) is None
    same(train_many(task, [*jobs(task, sizes)]), one_by_one(task, [*jobs(task, sizes)]))
    assert batched


@pytest.mark.parametrize("clipping_norm", [0.1, 1e6])
@pytest.mark.parametrize("model", [Sentences, Gated, Simple])
def test_each_record_of_sequences_has_a_gradient_of_its_own_to_clip(model, clipping_norm):
    task = problem(model)
    (job,) = jobs(task, [9])
    names = list(job.params)
    gradient = ClippedGradient(task, names, clipping_norm=clipping_norm)
    ours = gradient(job.params, job.examples.features, job.examples.targets)
    theirs = by_loop(task, job.params, job.examples, clipping_norm, names)
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def test_long_sequences_take_more_memory():
    task = problem(Gated)
    (short,) = jobs(task, [8])
    words = short.examples.features
    long = Job(
        params=short.params,
        examples=Examples(words.repeat(1, 50), short.examples.targets),
        training=short.training,
        generator=short.generator,
    )
    few, many = together(task, long, 2**24), together(task, short, 2**24)
    assert many / 60 < few < many / 10


@pytest.mark.parametrize(("layer", "most"), [(nn.LSTM, 32), (nn.GRU, 128), (nn.RNN, 128)])
def test_large_layers_stay_one_operation_on_a_cpu(layer, most):
    cpu = torch.device("cpu")
    assert not faster_alone(layer(3, most), cpu)
    assert faster_alone(layer(3, most + 1), cpu)
    assert not faster_alone(layer(3, most + 1), torch.device("cuda"))
    assert not faster_alone(nn.Linear(3, 500), cpu)
