"""Compiled training of dense networks equals that of `train`, number by number."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from flower_ext.data import Examples
from flower_ext.training import (
    Job,
    Linear,
    LocalTraining,
    Proximal,
    train_each,
    train_groups,
)
from flower_ext.training.models import build, dropout
from flower_ext.training.models.dropout import draw_bits
from flower_ext.training.params import sizes
from flower_ext_kernels import native, network
from tests.support.grids import grid
from tests.support.jobs import assert_isolated, one_by_one, problem, same, train_many

digits_mlp, digits_logistic, mnist_mlp = (
    partial(build, name) for name in ("digits-mlp", "digits-logistic", "mnist-mlp")
)
SGD = LocalTraining(epochs=2, batch_size=4, learning_rate=0.3)
WAYS = {
    "plain": SGD,
    "momentum": replace(SGD, momentum=0.8),
    "sam": replace(SGD, sam_radius=0.2),
    "proximal": replace(SGD, proximal_weight=0.7),
    "all": replace(SGD, momentum=0.5, sam_radius=0.1, proximal_weight=0.4),
    "steps": replace(SGD, steps=5),
    "nothing": replace(SGD, epochs=0),
    "one batch": replace(SGD, batch_size=50),
    "one by one": replace(SGD, batch_size=1),
}


class Branching(nn.Module):
    """A branch on the input, odd widths, layers without bias, activations as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 13, bias=False)
        self.second = nn.Linear(13, 7)
        self.third = nn.Linear(7, 6)
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(x.flatten(1)) if x.dim() > 2 else self.first(x))
        return self.head(self.third(torch.sigmoid(self.second(x))).tanh())


class Plain(Branching):
    """The same network without a branch on its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(x))
        return self.head(self.third(torch.sigmoid(self.second(x))).tanh())


def narrow():
    return nn.Sequential(nn.Linear(64, 1), nn.Tanh(), nn.Linear(1, 10))


def norms_between():
    """Return blocks of a norm, an activation and dropout."""
    return nn.Sequential(
        *(nn.Linear(64, 12), nn.GroupNorm(2, 12), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(12, 13, bias=False), nn.Tanh(), nn.LayerNorm(13), nn.Dropout(0.2)),
        nn.Linear(13, 10),
    )


def norms_around():
    """Return networks with other norms in other places, and dropout before an activation."""
    return nn.Sequential(
        *(nn.Dropout(0.1), nn.LayerNorm(64, elementwise_affine=False, eps=1e-3)),
        *(nn.Linear(64, 20), nn.Dropout(0.2), nn.Sigmoid(), nn.GroupNorm(1, 20, affine=False)),
        *(nn.LayerNorm(20, bias=False), nn.Linear(20, 10), nn.GroupNorm(2, 10)),
    )


def task(model=digits_mlp, loss=functional.cross_entropy):
    return problem(model, loss)


def jobs(model=digits_mlp, way=SGD, sizes=(9, 4, 1, 12), terms=lambda start: ()):
    """Return clients with their own data, starts and orders of batches."""
    trainings = []
    for client, size in enumerate(sizes):
        random = torch.Generator().manual_seed(client)
        start = {n: p + 0.02 * client for n, p in task(model).initial_params(3).items()}
        trainings.append(
            Job(
                params=start,
                examples=Examples(
                    torch.randn(size, 64, generator=random),
                    torch.randint(10, (size,), generator=random),
                ),
                training=way,
                generator=torch.Generator().manual_seed(100 + client),
                terms=terms(start),
            )
        )
    return trainings


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [digits_mlp, digits_logistic, Plain, narrow])
def test_the_same_model_comes_out(model, way, compiled):
    ours = train_many(task(model), jobs(model, WAYS[way]))
    same(ours, one_by_one(task(model), jobs(model, WAYS[way])))
    assert len(compiled) == 4


@pytest.mark.parametrize(
    ("model", "way"),
    grid(
        product([norms_between, norms_around], WAYS),
        lambda case: (case[0] is norms_around) == (case[1] in [*WAYS][::2]),
    ),
)
def test_norms_and_dropout_are_those_of_the_loop(model, way, compiled):
    slow = replace(WAYS[way], learning_rate=0.05)  # norms amplify rounding differences
    ours = train_many(task(model), jobs(model, slow))
    same(ours, one_by_one(task(model), jobs(model, slow)))
    assert len(compiled) == 4


@pytest.mark.parametrize("model", [digits_mlp, norms_between])
def test_batch_invariant_training_depends_on_no_other_client_however_broken(model, compiled):
    assert_isolated(task(model), lambda: jobs(model, sizes=(16, 16, 5, 16, 9, 16)))
    assert len(compiled) == 19


@pytest.mark.parametrize("model", [norms_between, norms_around])
def test_masks_follow_the_generator_and_nothing_else(model, compiled):
    torch.manual_seed(1)
    one = train_many(task(model), jobs(model))
    torch.manual_seed(2)
    again = train_many(task(model), jobs(model))
    shifted = [
        replace(job, generator=torch.Generator().manual_seed(7 + client))
        for client, job in enumerate(jobs(model))
    ]
    other = train_many(task(model), shifted)
    assert len(compiled) == 12
    for first, same_seed, another in zip(one, again, other, strict=True):
        assert all(torch.equal(p, same_seed[name]) for name, p in first.items())
        assert not all(torch.equal(p, another[name]) for name, p in first.items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [digits_mlp, digits_logistic, narrow])
def test_a_training_alone_is_the_same_to_the_last_bit(model, way, compiled):
    among = train_many(task(model), jobs(model, WAYS[way]))
    compiled.clear()
    alone = [train_many(task(model), [job])[0] for job in jobs(model, WAYS[way])]
    assert len(compiled) == 4
    same(alone, one_by_one(task(model), jobs(model, WAYS[way])))
    for one, other in zip(alone, among, strict=True):
        assert all(torch.equal(one[name], p) for name, p in other.items())


def test_a_custom_model_class_is_compiled_for_a_single_job_too(compiled):
    (job, *_), (again, *_) = jobs(Plain), jobs(Plain)
    same(train_many(task(Plain), [job]), one_by_one(task(Plain), [again]))
    assert len(compiled) == 1


class Growing(Plain):
    """A network whose code does more than its layers show: each pass doubles its outputs again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale *= 2
        return super().forward(x) * self.scale


class Remembering(Plain):
    """A network that behaves differently after ``before`` passes."""

    before = 1

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = super().forward(x)
        return x if self.passes <= self.before else torch.relu(x)


class Late(Remembering):
    """A network that behaves differently after more passes than a trial has."""

    before = 4


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("model", [Growing, Remembering, Late])
def test_a_class_that_does_more_than_its_layers_show_is_not_compiled(model, clients, compiled):
    ours = train_many(task(model), jobs(model)[:clients])
    same(ours, one_by_one(task(model), jobs(model)[:clients]))
    assert compiled == []


@pytest.mark.parametrize(("threads", "gains"), [(1, True), (2, True), (3, False), (16, False)])
def test_large_layers_alone_are_left_to_many_threads(threads, gains, monkeypatch):
    (job, *_) = jobs(digits_mlp)
    form = network.form_for(task(digits_mlp), job)
    work = form.size * job.training.batch_size
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(network, "_MOST_ON_MANY", work)
    assert form.gains_alone(job)
    monkeypatch.setattr(network, "_MOST_ON_MANY", work - 1)
    assert form.gains_alone(job) == gains


@pytest.mark.parametrize(("threads", "gains"), [(1, True), (2, False)])
def test_very_large_layers_alone_are_left_to_any_second_thread(threads, gains, monkeypatch):
    (job, *_) = jobs(digits_mlp)
    form = network.form_for(task(digits_mlp), job)
    work = form.size * job.training.batch_size
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(network, "_MOST_ON_FEW", work)
    assert form.gains_alone(job)
    monkeypatch.setattr(network, "_MOST_ON_FEW", work - 1)
    assert form.gains_alone(job) == gains


@pytest.mark.parametrize("way", ["plain", "momentum", "sam", "all"])
def test_terms_pull_as_in_the_loop(way, compiled):
    def terms(start):
        return [
            Proximal(weight=0.6, anchor={n: p - 0.1 for n, p in start.items()}),
            Linear(direction={n: torch.full_like(p, 0.05) for n, p in start.items()}),
        ]

    ours = train_many(task(), jobs(way=WAYS[way], terms=terms))
    same(ours, one_by_one(task(), jobs(way=WAYS[way], terms=terms)))
    without = train_many(task(), jobs(way=WAYS[way]))
    assert not torch.allclose(ours[0]["head.weight"], without[0]["head.weight"], atol=1e-3)
    assert len(compiled) == 8


@pytest.mark.parametrize("way", ["plain", "momentum", "all"])
@pytest.mark.parametrize(
    "trained",
    [
        lambda name: name.startswith("head"),
        lambda name: name.startswith("extractor"),
        lambda name: name.endswith("bias"),
        lambda name: name == "extractor.1.weight",
    ],
    ids=["head", "extractor", "biases", "a weight"],
)
def test_the_rest_is_frozen(trained, way, compiled):
    ours = train_many(task(), jobs(way=WAYS[way]), trained=trained)
    same(ours, one_by_one(task(), jobs(way=WAYS[way]), trained))
    for model, job in zip(ours, jobs(), strict=True):
        for name, start in job.params.items():
            assert torch.equal(model[name], start) != trained(name)
    assert len(compiled) == 4


@pytest.mark.parametrize("way", ["plain", "momentum", "all"])
@pytest.mark.parametrize("chosen", ["1.weight", "1.bias", "6.weight", "4.weight", "1."])
def test_norms_train_as_any_other_part(chosen, way, compiled):
    def trained(name):
        return name.startswith(chosen)

    slow = replace(WAYS[way], learning_rate=0.05)
    ours = train_many(task(norms_between), jobs(norms_between, slow), trained=trained)
    same(ours, one_by_one(task(norms_between), jobs(norms_between, slow), trained))
    start = jobs(norms_between)[0].params
    assert all(torch.equal(ours[0][name], start[name]) != trained(name) for name in start)
    assert len(compiled) == 4


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="trained selects no parameter"):
        train_many(task(), jobs(), trained=lambda name: False)


def test_images_are_flattened_and_all_may_be_views(compiled):
    random = torch.Generator().manual_seed(0)
    images = torch.randn(28, 28, 1, 30, generator=random).permute(3, 2, 0, 1)
    digits = torch.arange(30) % 10

    def make_jobs():
        return [
            Job(
                params=task(mnist_mlp).initial_params(0),
                examples=Examples(images[start::2], digits[start::2]),
                training=replace(SGD, momentum=0, sam_radius=0),
                generator=torch.Generator().manual_seed(start),
            )
            for start in range(2)
        ]

    same(train_many(task(mnist_mlp), make_jobs()), one_by_one(task(mnist_mlp), make_jobs()))
    assert len(compiled) == 2


def test_inputs_stay_unchanged_and_results_share_no_memory(compiled):
    trainings = jobs()
    shared = trainings[0].params
    before = {name: p.clone() for name, p in shared.items()}
    ours = train_many(task(), [replace(job, params=shared) for job in trainings])
    for model in ours:
        for p in model.values():
            p.fill_(7.0)
    for name, p in shared.items():
        assert torch.equal(p, before[name])
    assert len(compiled) == 4


def test_a_diverged_model_is_not_made_to_look_sound(compiled):
    wild = replace(SGD, learning_rate=1e30, epochs=20)
    for model in train_many(task(), jobs(way=wild, sizes=(12, 12))):
        assert not all(p.isfinite().all() for p in model.values())
    assert len(compiled) == 2


def network_of(model, *shape):
    return network._network(model, torch.Size(shape), sizes(model().state_dict()))


def test_few_models_are_held_at_a_time(compiled):
    size = network_of(digits_mlp, 64).size
    limit = 2 * 16 * size
    groups = [group for group, _ in train_groups(task(), jobs(), memory_limit=limit)]
    assert groups == [[0, 1], [2, 3]]
    each = train_each(task(), jobs(), memory_limit=limit)
    next(each)
    assert len(compiled) == 4 + 2


def test_what_dropout_draws_takes_room_too(compiled, monkeypatch):
    trainings = jobs(norms_between, SGD, [9, 4, 40, 12])
    form = network_of(norms_between, 64)
    small, large = (
        form.size + 2 * form._count_draws(trainings[0]),
        2 * form._count_draws(trainings[2]),
    )
    assert form.groups(trainings, 16 * small) == [[0], [1], [2], [3]]
    assert form.groups(trainings, 16 * 2 * small) == [[0, 1], [2], [3]]
    monkeypatch.setattr(network, "_MOST_DRAWN", large - 1)
    assert form.groups(trainings, 2**30) == [[0, 1, 3]]
    slow = replace(SGD, learning_rate=0.05)
    ours = train_many(task(norms_between), jobs(norms_between, slow, [9, 4, 40, 12]))
    expected = jobs(norms_between, slow, [9, 4, 40, 12])
    same(ours, one_by_one(task(norms_between), expected))
    assert len(compiled) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4, 9, 12])
def test_as_much_is_drawn_as_dropout_needs(way, size, monkeypatch):
    """The layers of a training determine how many numbers it draws."""
    (job,) = jobs(norms_between, replace(WAYS[way], learning_rate=0.05), [size])
    drawn = []

    def counted(count, generator):
        drawn.append(count)
        return draw_bits(count, generator)

    monkeypatch.setattr(dropout, "draw_bits", counted)
    one_by_one(task(norms_between), [job])
    (again,) = jobs(norms_between, WAYS[way], [size])
    assert network_of(norms_between, 64)._count_draws(again) == sum(drawn)


def dropping_all():
    return nn.Sequential(nn.Linear(64, 5), nn.Dropout(1.0), nn.Linear(5, 10))


def twice():
    layer = nn.Linear(64, 64)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(64, 10))


def buffered():
    model = nn.Sequential(nn.Linear(64, 10))
    model.register_buffer("counter", torch.zeros(1))
    return model


def normed():
    return nn.Sequential(nn.Linear(64, 5), nn.LayerNorm(5, eps=0.0), nn.Linear(5, 10))


def normed_elsewhere():
    return nn.Sequential(nn.Linear(64, 10), nn.GroupNorm(2, 4))


def activated_first():
    return nn.Sequential(nn.ReLU(), nn.Linear(64, 10))


def activated_twice():
    return nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Sigmoid())


def mismatched():
    return nn.Sequential(nn.Linear(64, 5), nn.ReLU(), nn.Linear(6, 10))


class Again(nn.Module):
    """A layer that is used three times."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(64, 6), nn.Linear(6, 6), nn.Linear(6, 10)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x)


def tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    return model


def hooked():
    model = narrow()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def hooked_whole():
    model = narrow()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model


def weight_normed():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 5)), nn.ReLU(), nn.Linear(5, 10))


@pytest.mark.parametrize(
    "model",
    [
        *(dropping_all, twice, buffered, normed, normed_elsewhere, activated_first),
        *(activated_twice, mismatched, Branching),
        *(Again, tied, hooked, hooked_whole, weight_normed),
    ],
)
def test_other_models_are_left_to_the_loop(model):
    assert network_of(model, 64) is None


@pytest.mark.parametrize("model", [Again, tied, hooked, hooked_whole, weight_normed])
def test_what_a_chain_does_not_show_is_trained_right(model, compiled):
    small = replace(SGD, learning_rate=0.05)
    ours = train_many(task(model), jobs(model, small))
    same(ours, one_by_one(task(model), jobs(model, small)))
    assert compiled == []


class Factory:
    """A factory whose models follow its settings."""

    width = 5

    def build(self):
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))


def test_a_factory_with_new_settings_makes_new_models(compiled):
    factory = Factory()
    for factory.width in (5, 7, 5):
        ours = train_many(task(factory.build), jobs(factory.build))
        same(ours, one_by_one(task(factory.build), jobs(factory.build)))
    assert len(compiled) == 3 * 4


def test_a_layer_for_other_examples_is_left_to_the_loop():
    assert network_of(digits_mlp, 65) is None
    unflattened = partial(nn.Sequential, nn.Linear(8, 10))
    assert network_of(unflattened, 8, 8) is None
    assert network_of(unflattened, 8) is not None


def weighted(outputs, targets):
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


@pytest.mark.parametrize("change", ["loss", "class", "kind", "dtype", "start"])
def test_what_compiled_code_does_not_know_is_left_to_others(change):
    given, trainings = task(), jobs()
    assert network.form_for(given, trainings[0]) is not None
    last = trainings[-1]
    x, y = last.examples.features, last.examples.targets
    if change == "loss":
        given = task(loss=weighted)
    elif change == "class":  # ignored by cross_entropy
        trainings[-1] = replace(last, examples=Examples(x, torch.where(y == 0, y, -100)))
    elif change == "kind":
        trainings[-1] = replace(last, examples=Examples(x, y.to(torch.uint8)))
    elif change == "dtype":
        trainings[-1] = replace(last, examples=Examples(x.double(), y))
    else:
        trainings[-1] = replace(last, params={n: p.double() for n, p in last.params.items()})
    form = network.form_for(given, trainings[0])
    if change == "loss":
        assert form is None
    else:
        assert form.takes(trainings) == [True] * (len(trainings) - 1) + [False]


@pytest.fixture
def detected_again():
    """Forget what was detected about this machine, before and after the test."""
    network._library.cache_clear()
    yield
    network._library.cache_clear()


@pytest.mark.parametrize(("of", "name"), [("machine", "arm64"), ("system", "Windows")])
def test_another_machine_trains_in_batches(of, name, monkeypatch, detected_again):
    monkeypatch.setattr(network.platform, of, lambda: name)
    assert network.form_for(task(), jobs()[0]) is None


def not_compiled(folders):
    raise native.NotCompiled("not compiled here")


def test_without_machine_code_batches_train_the_same_models(
    monkeypatch, detected_again, compiled, caplog
):
    ours = train_many(task(), jobs())
    assert len(compiled) == 4
    monkeypatch.setattr(native, "_read_stored", not_compiled)
    network._library.cache_clear()
    with caplog.at_level("INFO", "flwr"):
        same(train_many(task(), jobs()), ours)
    assert "would train faster: not compiled here" in caplog.text
    assert len(compiled) == 4
