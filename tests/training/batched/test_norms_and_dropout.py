"""Norms and dropout in a batch of models: each model normalises and draws as it would alone."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from opacus.layers import DPGRU
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import Job, LocalTraining
from flower_ext.training.models.dropout import Draws, Dropout
from tests.support.grids import grid
from tests.support.jobs import (
    UNEVEN,
    assert_isolated,
    one_by_one,
    problem,
    same,
    train_many,
    why_apart,
)

SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05)
WAYS = {
    "sgd": [SGD],
    "sam": [replace(SGD, sam_radius=0.1, momentum=0.5)],
    "one batch": [replace(SGD, batch_size=50)],
    "some with sam": [
        replace(SGD, sam_radius=0.1),
        replace(SGD, steps=5),
        replace(SGD, batch_size=3),
        replace(SGD, momentum=0.9, proximal_weight=0.3),
    ],
}


def chain(*between):
    """Return two dense layers with other layers between them."""
    return nn.Sequential(nn.Linear(7, 12), *(build() for build in between), nn.Linear(12, 3))


class Nested(nn.Module):
    """Nested blocks, of which two are added."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(7, 12), nn.Sequential(nn.Dropout(0.2), nn.Tanh()))
        self.other = nn.Sequential(nn.Linear(7, 12), nn.GroupNorm(4, 12), nn.Dropout(0.5))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.one(x) + self.other(x))


def of_images(*between):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), *(build() for build in between), nn.Flatten(), nn.Linear(64, 3)
    )


VECTORS = {
    "one group": partial(chain, partial(nn.GroupNorm, 1, 12)),
    "groups": partial(chain, partial(nn.GroupNorm, 3, 12), nn.ReLU),
    "groups of one's own": partial(chain, partial(nn.GroupNorm, 2, 12, affine=False), nn.Tanh),
    "a layer": partial(chain, partial(nn.LayerNorm, 12)),
    "a layer without bias": partial(chain, partial(nn.LayerNorm, 12, bias=False)),
    "a layer of one's own": partial(chain, partial(nn.LayerNorm, 12, elementwise_affine=False)),
    "dropout of 0.2": partial(chain, nn.ReLU, partial(nn.Dropout, 0.2)),
    "dropout of 0.5": partial(chain, partial(nn.Dropout, 0.5)),
    "dropout in place": partial(chain, partial(nn.Dropout, 0.5, inplace=True)),
    "dropout of all": partial(chain, partial(nn.Dropout, 1.0)),
    "nested": Nested,
    "a block": partial(chain, partial(nn.GroupNorm, 4, 12), nn.ReLU, partial(nn.Dropout, 0.3)),
}
IMAGES = {
    "groups of channels": partial(
        of_images, partial(nn.GroupNorm, 2, 4), nn.ReLU, partial(nn.Dropout, 0.3)
    ),
    "channels of one's own": partial(of_images, partial(nn.GroupNorm, 4, 4, affine=False)),
    "an image": partial(of_images, partial(nn.LayerNorm, [4, 4, 4]), partial(nn.Dropout, 0.2)),
    "rows": partial(of_images, partial(nn.LayerNorm, 4)),
}
SHAPES = {**dict.fromkeys(VECTORS, (7,)), **dict.fromkeys(IMAGES, (2, 6, 6))}
MODELS = {**VECTORS, **IMAGES}


def jobs(which, settings, sizes=UNEVEN, seed=0):
    made = []
    for client, size in enumerate(sizes):
        random = torch.Generator().manual_seed(client)
        start = problem(MODELS[which]).initial_params(3)
        made.append(
            Job(
                params={name: p + 0.01 * client for name, p in start.items()},
                examples=Examples(
                    torch.randn(size, *SHAPES[which], generator=random),
                    torch.randint(3, (size,), generator=random),
                ),
                training=settings[client % len(settings)],
                generator=torch.Generator().manual_seed(1000 * seed + client),
            )
        )
    return made


SIZES = {"alike": [16] * 5, "uneven": UNEVEN}
STACKS = [*product(MODELS, WAYS, SIZES)]
"""Every model in one way; two models, with all that these layers do, in all ways and sizes."""
DAILY = {(which, way, "uneven") for which, way in zip(MODELS, 4 * [*WAYS], strict=True)} | {
    ("groups of channels", way, "alike") for way in WAYS
}
# The others repeat a layer with other options.
KINDS = {
    *("groups", "a layer", "dropout of 0.5", "nested", "a block"),
    *("groups of channels", "an image"),
}


@pytest.mark.parametrize(("which", "way", "sizes"), grid(STACKS, DAILY.__contains__))
def test_a_stack_of_models_is_the_same_one_by_one(batched, which, way, sizes):
    task, counts = problem(MODELS[which]), SIZES[sizes]
    ours = train_many(task, jobs(which, WAYS[way], counts))
    same(ours, one_by_one(task, jobs(which, WAYS[way], counts)))
    assert sum(batched) == len(counts)


class Read(nn.Module):
    """A model of words, with or without a recurrent layer, and dropout after each."""

    def __init__(self, recurrent):
        super().__init__()
        self.words, self.drop = nn.Embedding(10, 6, padding_idx=9), nn.Dropout(0.2)
        self.read = DPGRU(6, 5, batch_first=True) if recurrent else None
        self.forget, self.head = nn.Dropout(0.5), nn.Linear(5 if recurrent else 6, 3)

    def forward(self, x):
        x = self.drop(self.words(x))
        x = x if self.read is None else self.read(x)[0]
        return self.head(self.forget(x.mean(dim=1)))


@pytest.mark.parametrize(
    ("way", "recurrent"),
    grid(
        product(WAYS, [False, True]),
        lambda case: case[1] == (case[0] in ("sgd", "one batch")),
    ),
)
def test_models_of_words_draw_as_by_themselves_too(batched, way, recurrent):
    task = problem(partial(Read, recurrent))

    def texts():
        for job in jobs("one group", WAYS[way]):
            words = (100 * job.examples.features[:, :5]).abs().long() % 10
            yield replace(
                job,
                params=task.initial_params(0),
                examples=Examples(words, job.examples.targets),
            )

    same(train_many(task, [*texts()]), one_by_one(task, [*texts()]))
    assert sum(batched) == len(UNEVEN)


@pytest.mark.parametrize("which", grid(MODELS, KINDS.__contains__))
def test_batch_invariant_training_depends_on_no_other_client_however_odd(which):
    sizes = [16, 16, 5, 16, 16, 16]
    assert_isolated(problem(MODELS[which]), lambda: jobs(which, [SGD], sizes))


@pytest.mark.parametrize("which", ["dropout of 0.2", "nested"])
def test_masks_follow_the_generator_and_nothing_else(which):
    task = problem(MODELS[which])

    def trained(seed, sizes=(16,) * 5):
        return train_many(task, jobs(which, [SGD], sizes, seed))

    torch.manual_seed(1)
    one = trained(0)
    torch.manual_seed(2)
    for first, again, other in zip(one, trained(0), trained(1), strict=True):
        for name, p in first.items():
            assert torch.equal(p, again[name])
            assert not torch.equal(p, other[name])


def drawing_while_built():
    torch.rand(5)
    return chain(partial(nn.Dropout, 0.5))


def test_masks_ignore_what_a_model_draws_while_it_is_built():
    which = "dropout of 0.5"
    ours = one_by_one(problem(drawing_while_built), jobs(which, [SGD]))
    same(ours, one_by_one(problem(MODELS[which]), jobs(which, [SGD])))


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9])
def test_dropout_drops_so_many_and_keeps_the_mean(p):
    layer, x = Dropout(p), torch.full((300, 1000), 2.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        alone = layer(x)
    draws = Draws([torch.Generator().manual_seed(client) for client in range(3)], [100] * 3)
    noise = draws.noise((3, 100, 1000), p, torch.float32)
    for share in ((alone == 0).float().mean(), *(noise == 0).float().mean(dim=(1, 2))):
        assert abs(float(share) - p) < 5 * math.sqrt(p * (1 - p) / 100_000)
    kept = alone[alone != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / (1 - p)), rtol=1e-4, atol=0)
    assert set(noise.unique().tolist()) == {0.0, float(kept[0]) / 2}


def test_no_two_masks_are_alike():
    draws = Draws([torch.Generator().manual_seed(client) for client in range(2)], [40, 40])
    masks = [draws.noise((2, 40, 50), 0.5, torch.float32) for _ in range(2)]
    rows = torch.cat([mask.flatten(0, 1) for mask in masks]) - 1
    alike = (rows @ rows.mT - 50 * torch.eye(len(rows))).abs()
    assert float(alike.max()) < 6 * math.sqrt(50)


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 3, 1]])
@pytest.mark.parametrize("shape", [(5,), (4,), (3, 2, 2)])
def test_a_model_draws_in_a_batch_what_it_draws_alone(counts, shape):
    draws = Draws([torch.Generator().manual_seed(client) for client in range(3)], counts)
    together = [draws.noise((3, 4, *shape), p, torch.float32) for p in (0.2, 0.5)]
    for client, count in enumerate(counts):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(client)
            for p, masks in zip((0.2, 0.5), together, strict=True):
                assert torch.equal(Dropout(p)(torch.ones(count, *shape)), masks[client, :count])


def test_a_model_that_is_not_trained_drops_nothing():
    x = torch.randn(4, 5)
    assert torch.equal(Dropout(0.5).eval()(x), x)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.Dropout1d])
def test_other_kinds_of_dropout_train_one_by_one(kind):
    task = problem(partial(chain, kind))
    assert "draw different random numbers" in why_apart(task, jobs("one group", [SGD]))


def test_frozen_norms_stay_and_what_is_below_them_trains(batched):
    task = problem(MODELS["a block"])

    def trained(name):
        return not name.startswith("1.")

    ours = train_many(task, jobs("a block", [SGD]), trained=trained)
    same(ours, one_by_one(task, jobs("a block", [SGD]), trained))
    assert sum(batched) == len(UNEVEN)
    for model, job in zip(ours, jobs("a block", [SGD]), strict=True):
        for name, p in model.items():
            assert torch.equal(p, job.params[name]) != trained(name)
