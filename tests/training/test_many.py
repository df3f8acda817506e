"""Many local trainings at once are the same trainings one by one."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from flower_ext.data import ClientData, Examples
from flower_ext.training import (
    Job,
    Linear,
    LocalTraining,
    Proximal,
    Task,
    cox_loss,
    evaluate,
    train,
)
from flower_ext.training import many as module
from flower_ext.training.many import (
    evaluate_many,
    together,
    train_groups,
    train_many,
    why_apart,
)


class Dense(nn.Module):
    """Two layers, a head, and a buffer that plays a part."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.extractor(x))) * self.scale)


class Convolutional(nn.Module):
    """Images 2×6×6."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Words(nn.Module):
    """Sequences of five word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(dim=1))


def features(model, count, generator):
    if model is Words:
        return torch.randint(11, (count, 5), generator=generator)
    shape = (2, 6, 6) if model in (Convolutional, double_convolutional) else (4,)
    return torch.randn(count, *shape, generator=generator)


def problem(model=Dense, loss=cross_entropy):
    return Task(model=model, data=lambda client: ClientData(None, None), loss=loss, device="cpu")


def jobs_of(model, settings, sizes, terms=lambda start, client: []):
    """Fresh jobs: own data, own start, own batch order."""
    made = []
    for client, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(client)
        start = {n: p + 0.01 * client for n, p in problem(model).initial_params(3).items()}
        data = Examples(
            features=features(model, size, generator),
            targets=torch.randint(3, (size,), generator=generator),
        )
        training = settings[client % len(settings)]
        made.append(
            Job(
                params=start,
                examples=data,
                training=training,
                generator=torch.Generator().manual_seed(100 + client),
                terms=terms(start, client),
            )
        )
    return made


def one_by_one(task, jobs, trained=lambda name: True):
    return [
        train(
            task,
            job.params,
            job.examples,
            job.training,
            trained=trained,
            terms=job.terms,
            generator=job.generator,
        )
        for job in jobs
    ]


@pytest.fixture
def batched(monkeypatch):
    """Every training in a batch, however few; returns how many jobs each batch held."""
    held = []
    groups = module.train_groups

    def counted(*args, **settings):
        for group, rows in groups(*args, **settings):
            held.extend([len(group)] * (len(group) > 1))
            yield group, rows

    monkeypatch.setattr(module.MappedModel, "fewest", 1)
    monkeypatch.setattr(module, "train_groups", counted)
    return held


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        for name in other:
            assert one[name].dtype == other[name].dtype
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5)


SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.2)
ALIKE, UNEVEN = [16] * 7, [3, 40, 8, 17, 16, 5, 30]
WAYS = {
    "sgd": [SGD],
    "momentum": [replace(SGD, momentum=0.7)],
    "sam": [replace(SGD, sam_radius=0.3, momentum=0.5)],
    "proximal": [replace(SGD, proximal_weight=0.5)],
    "steps": [replace(SGD, steps=5)],
    "stragglers": [SGD, replace(SGD, epochs=1), replace(SGD, epochs=5)],
    "nothing to do": [replace(SGD, epochs=0), SGD],
    "all different": [
        SGD,
        replace(SGD, batch_size=3, learning_rate=0.05),
        replace(SGD, momentum=0.9, epochs=1),
        replace(SGD, sam_radius=0.2, proximal_weight=0.3),
    ],
}


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_trainings_equals_them_one_by_one(batched, way, sizes):
    ours = train_many(problem(), jobs_of(Dense, WAYS[way], sizes))
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS[way], sizes)))
    assert sum(batched) == len(sizes)
    start = jobs_of(Dense, WAYS[way], sizes)[1].params
    assert not torch.allclose(ours[1]["head.weight"], start["head.weight"], atol=1e-3)


def pulled(start, client):
    """Two terms of either kind, other ones for every client."""
    generator = torch.Generator().manual_seed(client)
    elsewhere = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in start.items()}
    direction = {n: 0.1 * torch.randn(p.shape, generator=generator).to(p) for n, p in start.items()}
    return [Proximal(weight=0.1 * client, anchor=elsewhere), Linear(direction=direction)]


@pytest.mark.parametrize("way", ["sgd", "sam", "proximal", "all different"])
def test_terms_of_every_client_act_on_it_alone(batched, way):
    ours = train_many(problem(), jobs_of(Dense, WAYS[way], UNEVEN, pulled))
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS[way], UNEVEN, pulled)))
    without = train_many(problem(), jobs_of(Dense, WAYS[way], UNEVEN))
    assert not torch.allclose(ours[2]["head.weight"], without[2]["head.weight"], atol=1e-3)
    assert batched


@pytest.mark.parametrize("part", ["head", "extractor"])
def test_a_frozen_part_is_each_clients_own_and_stays(batched, part):
    def chosen(name):
        return name.startswith(part)

    jobs = jobs_of(Dense, WAYS["sam"], UNEVEN)
    ours = train_many(problem(), jobs, trained=chosen)
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS["sam"], UNEVEN), chosen))
    for job, model in zip(jobs, ours, strict=True):
        for name, value in job.params.items():
            assert torch.equal(model[name], value) == (not chosen(name))
    assert batched


@pytest.mark.parametrize("model", [Convolutional, Words])
@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
def test_convolutions_and_embeddings_train_in_batches_too(batched, monkeypatch, model, sizes):
    monkeypatch.setattr(module, "why_apart", lambda task, jobs: None)
    ways = WAYS["sam"]
    same(
        train_many(problem(model), jobs_of(model, ways, sizes)),
        one_by_one(problem(model), jobs_of(model, ways, sizes)),
    )
    assert batched


def label_smoothing(outputs, targets):
    return cross_entropy(outputs, targets, label_smoothing=0.2)


def test_a_loss_of_ones_own_is_averaged_over_each_clients_examples(batched):
    task = problem(loss=label_smoothing)
    ours = train_many(task, jobs_of(Dense, [SGD], UNEVEN))
    same(ours, one_by_one(task, jobs_of(Dense, [SGD], UNEVEN)))
    assert batched


def class_weights(outputs, targets):
    return cross_entropy(outputs, targets, weight=torch.tensor([0.1, 1.0, 5.0]))


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("model", [Dense, Convolutional])
@pytest.mark.parametrize("way", ["sgd", "all different"])
def test_a_batch_loss_that_is_no_mean_over_examples_is_each_clients_own(batched, model, sizes, way):
    task = problem(model, class_weights)
    ours = train_many(task, jobs_of(model, WAYS[way], sizes))
    same(ours, one_by_one(task, jobs_of(model, WAYS[way], sizes)))
    assert batched


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("model", [Dense, Convolutional])
def test_targets_that_cross_entropy_ignores_do_not_count(batched, model, sizes):
    def jobs():
        made = jobs_of(model, [SGD], sizes)
        for job in made:
            job.examples.targets[::3] = -100
        made[1].examples.targets[:] = -100
        return made

    same(train_many(problem(model), jobs()), one_by_one(problem(model), jobs()))
    assert batched


class Tagging(nn.Module):
    """A class for each of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.unsqueeze(-1)).transpose(1, 2)


def test_an_example_may_have_many_targets(batched):
    def jobs():
        for job in jobs_of(Tagging, [SGD], UNEVEN):
            yield replace(job, examples=Examples(job.examples.features, targets_of(job)))

    def targets_of(job):
        return torch.bucketize(job.examples.features, torch.tensor([-0.5, 0.5]))

    same(train_many(problem(Tagging), list(jobs())), one_by_one(problem(Tagging), list(jobs())))


def perceptron(*between):
    return nn.Sequential(nn.Linear(4, 5), *between, nn.Linear(5, 3))


def double():
    return perceptron(nn.LayerNorm(5)).double()


def double_stacked():
    return perceptron(nn.ELU()).double()


def double_convolutional():
    return Convolutional().double()


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("way", ["sgd", "all different"])
@pytest.mark.parametrize("model", [double, double_stacked, double_convolutional])
def test_models_of_double_precision_train_in_double_precision(batched, model, way, sizes):
    def jobs():
        for job in jobs_of(model, WAYS[way], sizes, pulled):
            data = Examples(job.examples.features.double(), job.examples.targets)
            yield replace(job, examples=data)

    ours = train_many(problem(model), list(jobs()))
    alone = one_by_one(problem(model), list(jobs()))
    for one, other in zip(ours, alone, strict=True):
        for name, p in other.items():
            torch.testing.assert_close(one[name], p, rtol=1e-12, atol=1e-12)
    assert batched


class Counting(nn.Module):
    """Remembers a mean of what it saw: in place, or in a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.mean.mul_(0.9).add_(0.1 * x.mean(dim=0))
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return self.head(x - self.mean)


class Compared(nn.Module):
    """Each example is seen beside the others of its mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x - x.mean(dim=0))


def instance_normed():
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), norm, nn.Flatten(), nn.Linear(4, 3))


def hooked():
    model = perceptron(nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def spectral_normed():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 3))


@dataclass
class Width:
    """A factory without a hash."""

    width: int

    def __call__(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.LayerNorm(self.width), nn.Tanh())


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize(
    "model",
    [
        partial(Counting, True),
        partial(Counting, False),
        *(Compared, instance_normed, hooked, spectral_normed, Width(3)),
    ],
)
def test_models_of_any_kind_are_those_of_the_loop(batched, model, sizes):
    small = [replace(SGD, learning_rate=0.05)]
    same(
        train_many(problem(model), jobs_of(model, small, sizes)),
        one_by_one(problem(model), jobs_of(model, small, sizes)),
    )


class Dropping(nn.Module):
    """Dropout that no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(dropout(x, 0.5, self.training))


def randomly_leaky():
    return perceptron(nn.RReLU())


@pytest.mark.parametrize("model", [Dropping, randomly_leaky])
def test_models_that_draw_numbers_are_trained_one_by_one(batched, model):
    assert len(train_many(problem(model), jobs_of(model, [SGD], ALIKE))) == len(ALIKE)
    assert why_apart(problem(model), jobs_of(model, [SGD], ALIKE))
    assert batched == []


class Factory:
    """Whose models follow its settings."""

    width = 5

    def build(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.LayerNorm(self.width))


def test_a_factory_with_new_settings_makes_new_models(batched):
    factory = Factory()
    for factory.width in (5, 7, 5):
        build = factory.build
        ours = train_many(problem(build), jobs_of(build, [SGD], ALIKE))
        same(ours, one_by_one(problem(build), jobs_of(build, [SGD], ALIKE)))
    assert len(batched) == 3


def test_chunks_respect_the_memory_limit_and_change_nothing(batched):
    jobs = jobs_of(Dense, [SGD], [16] * 12)
    numbers = sum(p.numel() for p in jobs[0].params.values())
    enough_for_three = 3 * (4 * (8 * numbers + 16 * 4 + 3 * 8 * (5 + 5 + 3 + 3 + 4)))
    assert together(problem(), jobs[0], enough_for_three) == 3
    ours = train_many(problem(), jobs, memory_limit=enough_for_three)
    assert batched == [3, 3, 3, 3]
    same(ours, one_by_one(problem(), jobs_of(Dense, [SGD], [16] * 12)))
    assert together(problem(), jobs[0], 1) == 1


def test_a_single_long_training_does_not_hold_up_a_batch(batched, monkeypatch):
    monkeypatch.setattr(module.MappedModel, "fewest", 5)
    sizes = [8] * 6 + [800]
    ours = train_many(problem(), jobs_of(Dense, [SGD], sizes))
    assert batched == [6]
    same(ours, one_by_one(problem(), jobs_of(Dense, [SGD], sizes)))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm1d(4), "batch normalisation"),
        (nn.Dropout(0.5), "dropout"),
        (nn.LSTM(4, 4), "recurrent"),
    ],
)
def test_models_that_gain_nothing_in_a_batch_are_trained_one_by_one(layer, said):
    task = problem(lambda: nn.Sequential(layer))
    assert said in why_apart(task, jobs_of(Dense, [SGD], ALIKE))


class Cubic:
    """A term that nobody knows how to batch."""

    def __call__(self, params):
        return sum(p.pow(3).sum() for p in params.values())


@pytest.mark.parametrize(
    "jobs",
    [
        lambda: jobs_of(Dense, [replace(SGD, learning_rate=0.01)], ALIKE, lambda *_: [Cubic()]),
        lambda: jobs_of(Dense, [LocalTraining(tolerance=1e-6, proximal_weight=50.0)], [6] * 5),
    ],
    ids=["a term of one's own", "exact minimisers"],
)
def test_what_cannot_be_batched_is_trained_all_the_same(batched, jobs):
    same(train_many(problem(), jobs()), one_by_one(problem(), jobs()))
    assert batched == []


def test_no_jobs_give_no_models():
    assert train_many(problem(), []) == []


def test_a_client_without_examples_is_an_error(batched):
    with pytest.raises(ValueError, match="without examples"):
        train_many(problem(), jobs_of(Dense, [SGD], [4, 0, 4]))


def test_trained_has_to_select_something(batched):
    with pytest.raises(ValueError, match="selects no parameter"):
        train_many(problem(), jobs_of(Dense, [SGD], ALIKE), trained=lambda name: False)


def test_the_jobs_own_models_are_left_as_they_are(batched):
    jobs = jobs_of(Dense, [SGD], ALIKE)
    before = [{n: p.clone() for n, p in job.params.items()} for job in jobs]
    train_many(problem(), jobs)
    for job, kept in zip(jobs, before, strict=True):
        assert all(torch.equal(job.params[n], p) for n, p in kept.items())


def compiled():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


@pytest.mark.parametrize("model", [compiled, Convolutional, Dense])
@pytest.mark.parametrize("sizes", [[20, 20], [9] * 5 + [12], [1, 2, 3, 3, 3, 7, 40]])
def test_where_asked_for_no_model_depends_on_which_others_train(model, sizes):
    unstable = LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9)

    def trained(members):
        made = jobs_of(model, [unstable], sizes)
        made[-1].examples.targets[0] = -100
        rows = train_groups(problem(model), [made[i] for i in members], steady=True)
        return {
            members[index]: {name: p[row].clone() for name, p in part.items()}
            for group, part in rows
            for row, index in enumerate(group)
        }

    everyone = trained(range(len(sizes)))
    for absent in range(len(sizes)):
        rest = trained([index for index in range(len(sizes)) if index != absent])
        for index, one in rest.items():
            assert all(torch.equal(p, everyone[index][name]) for name, p in one.items())


class Headed(nn.Module):
    """One layer after what ``before`` makes of a batch."""

    def __init__(self, before):
        super().__init__()
        self.before, self.head = before, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.before(x))


class Padded(nn.Module):
    """Sequences of words of which the last means none."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, padding_idx=9)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(dim=1))


class InTraining(nn.Linear):
    """A layer that puts out something else once it is trained."""

    def forward(self, x):
        out = super().forward(x)
        return out if self.training else torch.sigmoid(out)


def patched():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    forward = model.forward
    model.forward = lambda x: 2 * forward(x) + 1
    return model


def normal(count, generator):
    return torch.randn(count, 4, generator=generator)


ODD = {
    "the largest of a batch": (lambda: Headed(lambda x: x / x.abs().amax()), normal),
    "a word for none": (Padded, lambda n, g: torch.randint(10, (n, 6), generator=g)),
    "undefined for some numbers": (
        lambda: Headed(lambda x: torch.log(x) - torch.log(x).mean(dim=0)),
        lambda n, g: torch.rand(n, 4, generator=g) + 0.1,
    ),
    "bytes": (
        lambda: Headed(lambda x: x.float() / 255 - (x.float() / 255).mean(dim=0)),
        lambda n, g: torch.randint(256, (n, 4), generator=g).to(torch.uint8),
    ),
    "a patched forward pass": (patched, normal),
    "not built for training": (lambda: nn.Sequential(InTraining(4, 3)).eval(), normal),
    "features with a gradient": (
        lambda: nn.Linear(4, 3),
        lambda n, g: normal(n, g).requires_grad_(),
    ),
}


@pytest.mark.parametrize("which", ODD)
@pytest.mark.parametrize("sizes", [UNEVEN, ALIKE], ids=["uneven", "alike"])
def test_whatever_a_model_does_it_trains_as_by_itself(which, sizes):
    model, features_of = ODD[which]

    def jobs():
        for client, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(client)
            targets = torch.randint(3, (size,), generator=generator)
            yield Job(
                params=problem(model).initial_params(0),
                examples=Examples(features_of(size, generator), targets),
                training=SGD,
                generator=generator,
            )

    same(train_many(problem(model), [*jobs()]), one_by_one(problem(model), [*jobs()]))


def test_a_model_of_two_examples_at_least_is_never_given_one(batched):
    def model():
        return Headed(lambda x: x + 0 * x[1].mean())

    task, made = problem(model), [jobs_of(model, [SGD], ALIKE) for _ in range(2)]
    same(train_many(task, made[0]), one_by_one(task, made[1]))


class Lasso(Proximal):
    """A term that only inherits from one that batches know."""

    def __call__(self, params):
        return self.weight * sum(p.abs().sum() for p in params.values())


def test_a_term_that_inherits_from_another_is_not_taken_for_it():
    def made():
        return jobs_of(Dense, [SGD], ALIKE, lambda start, client: [Lasso(weight=0.1, anchor=start)])

    same(train_many(problem(), made()), one_by_one(problem(), made()))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Flatten(0), nn.Unflatten(0, (-1, 3))),
    ],
    ids=["looks at the batch", "two rows an example"],
)
def test_models_that_mix_examples_are_scored_one_by_one(model):
    def loss(outputs, targets):
        return cross_entropy(outputs, targets.repeat_interleave(len(outputs) // len(targets)))

    task = replace(problem(model, loss), metrics={})
    params = task.initial_params(0)
    examples = [job.examples for job in jobs_of(Dense, [SGD], UNEVEN)]
    for ours, own in zip(
        evaluate_many(task, [params] * len(examples), examples), examples, strict=True
    ):
        assert ours == pytest.approx(evaluate(task, params, own), abs=1e-6)


class OfAnyLength(nn.Module):
    """A model of sequences, which takes them as long as they are."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.step(x.float())).mean(dim=1)


def test_clients_whose_examples_differ_in_shape_or_type_are_kept_apart(batched):
    def jobs():
        for client, length in enumerate([5, 7, 5, 6, 7, 5, 5, 7]):
            generator = torch.Generator().manual_seed(client)
            features = torch.randn(10, length, 4, generator=generator)
            targets = torch.randint(3, (10,), generator=generator)
            yield Job(
                params=problem(OfAnyLength).initial_params(client % 2),
                examples=Examples(features.double() if client == 6 else features, targets),
                training=SGD,
                generator=generator,
            )

    task = problem(OfAnyLength)
    models = train_many(task, [*jobs()])
    same(models, one_by_one(task, [*jobs()]))
    assert sorted(batched) == [3, 3]
    examples = [job.examples for job in jobs()]
    for ours, data in zip(evaluate_many(task, models[:1] * 8, examples), examples, strict=True):
        assert ours == pytest.approx(evaluate(task, models[0], data), abs=1e-6)


@pytest.mark.parametrize("memory_limit", [1, 600, 2**30])
def test_models_are_scored_on_their_own_examples_shared_or_not(memory_limit):
    jobs = jobs_of(Dense, [SGD], UNEVEN)
    shared = jobs[0].params
    models = [shared, jobs[1].params, shared, shared, *(job.params for job in jobs[4:])]
    examples = [job.examples for job in jobs]
    for ours, model, own in zip(
        evaluate_many(problem(), models, examples, memory_limit=memory_limit),
        models,
        examples,
        strict=True,
    ):
        assert ours == pytest.approx(evaluate(problem(), model, own), abs=1e-6)


def test_a_loss_that_compares_examples_is_not_taken_apart():
    assert not problem().compares_examples
    assert not problem(loss=torch.conv1d).compares_examples  # has no signature to look at
    task = Task(
        model=lambda: nn.Linear(4, 1, bias=False),
        data=lambda client: ClientData(None, None),
        loss=cox_loss,
        device="cpu",
    )
    assert task.compares_examples
    training = LocalTraining(epochs=3, batch_size=8, learning_rate=0.1)

    def jobs():
        for client, size in enumerate((3, 8, 5, 11, 2, 6, 9)):
            generator = torch.Generator().manual_seed(client)
            time = torch.rand(size, generator=generator)
            event = (torch.rand(size, generator=generator) < 0.6).float()
            yield Job(
                params=task.initial_params(0),
                examples=Examples(
                    torch.randn(size, 4, generator=generator), torch.stack([time, event], dim=1)
                ),
                training=training,
                generator=generator,
            )

    alone = [
        train(task, job.params, job.examples, training, generator=job.generator) for job in jobs()
    ]
    for one, other in zip(alone, train_many(task, list(jobs())), strict=True):
        torch.testing.assert_close(one["weight"], other["weight"], atol=1e-5, rtol=0)
    start = task.initial_params(0)["weight"]
    assert any(not torch.allclose(one["weight"], start) for one in alone)


def test_models_come_batch_by_batch_and_are_those_of_all_at_once(batched):
    task, sizes = problem(), [3, 40, 8, 17, 16, 5, 30, 8, 8]
    limit = 2 * 4 * 8 * sum(p.numel() for p in task.initial_params(0).values())
    came = list(train_groups(task, jobs_of(Dense, [SGD], sizes), memory_limit=limit))
    assert len(came) > 2
    models = {
        index: {name: part[row] for name, part in rows.items()}
        for group, rows in came
        for row, index in enumerate(group)
    }
    ours = [models[index] for index in range(len(sizes))]
    same(ours, train_many(task, jobs_of(Dense, [SGD], sizes)))
