"""A training equals a plain loop on a new model, and shares no state with other trainings."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training import Job, LocalTraining, Task
from flower_ext.training.isolation import seeded
from flower_ext.training.job import batch_rows
from flower_ext.training.models import HeadedModel
from flower_ext.training.models.factory import in_training
from tests.support.jobs import batches, train_many, train_one

SGD = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1)
WAYS = {
    "plain": SGD,
    "momentum": LocalTraining(steps=5, batch_size=4, learning_rate=0.1, momentum=0.7),
    "near": LocalTraining(epochs=1, batch_size=4, learning_rate=0.1, proximal_weight=0.5),
}


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def images():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


def headed():
    return HeadedModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh()), nn.Linear(5, 3))


def tied():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    model[2].weight = model[1].weight
    return model


def twice():
    layer = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(64, 3))


def frozen_below():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for layer in (model[1], model[2]):
        layer.requires_grad_(False)
    return model


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Dropout(0.5), nn.Linear(9, 3))


class Own(nn.Module):
    """A model of the user's own class, with plain values and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(), nn.Linear(3, 3)
        self.power, self.calls = 2, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return self.head(self.body(x)).tanh() * self.power / len(self.calls)


MODELS = [dense, images, headed, tied, twice, frozen_below, Own]


def task(model) -> Task:
    return Task(model=model, data=lambda _: None, device="cpu")


def examples(seed: int = 0, count: int = 10) -> Examples:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 8, 8, generator=random)
    return Examples(x, torch.randint(3, (count,), generator=random))


def trained(given: Task, params, seed: int = 0, way: LocalTraining = SGD):
    random = torch.Generator().manual_seed(seed)
    return train_one(given, params, examples(seed), way, generator=random)


def plain_loop(given: Task, params, way: LocalTraining):
    """Train a newly built model by PyTorch's own optimizer."""
    model = in_training(given.model())
    model.load_state_dict(params, strict=False)
    weights = [p for p in model.parameters() if p.requires_grad]
    begin = [p.detach().clone() for p in weights]
    optimizer = torch.optim.SGD(weights, lr=way.learning_rate, momentum=way.momentum)
    data, random = examples(), torch.Generator().manual_seed(0)
    for rows in batch_rows(len(data), way, random):
        optimizer.zero_grad()
        loss = cross_entropy(model(data.features[rows].clone()), data.targets[rows])
        for p, start in zip(weights, begin, strict=True):
            loss = loss + way.proximal_weight / 2 * (p - start).square().sum()
        loss.backward()
        optimizer.step()
    return {name: value for name, value in model.state_dict().items() if name in params}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_in_a_plain_loop(model, way):
    given = task(model)
    params = given.initial_params(1)
    expected = plain_loop(given, params, WAYS[way])
    trained_params = trained(given, params, way=WAYS[way])
    assert set(trained_params) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(trained_params[name], value, rtol=1e-4, atol=1e-5)


def test_a_model_of_plain_layers_alone_is_known():
    known = [model for model in MODELS if task(model).factory.facts.known]
    assert known == [dense, images, headed, tied, twice, frozen_below]


@pytest.mark.parametrize("model", [*MODELS, dropping])
def test_a_training_leaves_nothing_for_the_next(model):
    given = task(model)
    params = given.initial_params(1)
    first = trained(given, params, seed=3)
    trained(given, {n: p + 1 for n, p in params.items()}, seed=4)
    again = trained(given, params, seed=3)
    torch.testing.assert_close(first, again, rtol=0, atol=0)


class Remembering(nn.Module):
    """A model that stores its last features and adds their mean to its next output."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(64, 3), [torch.zeros(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        former = self.last[-1]
        self.last.append(x.detach().mean())
        return self.head(x.flatten(1)) + former


class Counting(nn.Module):
    """A model that counts its calls in a buffer that does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x.flatten(1)) * self.calls


def hooked():
    """Return a model whose hook remembers the batch before."""
    seen = [torch.zeros(1)]

    def hook(module, inputs, output):
        seen.append(inputs[0].detach().mean())
        return output + seen[-2]

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model[1].register_forward_hook(hook)
    return model


def with_its_own_forward():
    """Return a model whose replaced forward remembers the batch before."""
    model, seen = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), [torch.zeros(1)]
    usual = model[1].forward

    def forward(x):
        seen.append(x.detach().mean())
        return usual(x) + seen[-2]

    model[1].forward = forward
    return model


def of_a_local_class():
    """Return a model whose class remembers the batch before."""

    class Keeper(nn.Linear):
        kept = torch.zeros(1)

        def forward(self, x):
            former = Keeper.kept
            Keeper.kept = x.detach().mean()
            return super().forward(x) + former

    return nn.Sequential(nn.Flatten(), Keeper(64, 3))


def parametrized():
    """Return a model whose parametrization remembers the weights before."""

    class Remembers(nn.Module):
        last = torch.zeros(1)

        def forward(self, weight):
            former = type(self).last
            type(self).last = weight.detach().mean()
            return weight + former

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.utils.parametrize.register_parametrization(model[1], "weight", Remembers())
    return model


@pytest.mark.parametrize(
    "model",
    [Remembering, Counting, hooked, with_its_own_forward, of_a_local_class, parametrized],
)
def test_a_model_that_remembers_forgets_between_trainings(model):
    """Each of these would add one person's data to the upload of another's training."""
    given = task(model)
    assert not given.factory.facts.known
    params = given.initial_params(1)
    first = trained(given, params, seed=3)
    trained(given, params, seed=4)
    again = trained(given, params, seed=3)
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_numbers_for_part_of_a_model_train_under_a_rebuilt_rest():
    given = task(dense)
    part = {name: p for name, p in given.initial_params(1).items() if name.startswith("3.")}
    trained_params, again = trained(given, part), trained(given, part)
    assert set(trained_params) == set(part)
    assert all(torch.equal(trained_params[name], again[name]) for name in part)
    assert not torch.equal(trained_params["3.weight"], part["3.weight"])


def test_building_a_model_draws_nothing_of_what_the_training_draws():
    """The first training of a process equals any later one."""

    def fresh():
        return dropping()

    params = task(fresh).initial_params(1)
    first, second = (trained(task(fresh), params, seed=2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in params)


@pytest.mark.parametrize("like", ["usual", "channels last"])
def test_a_model_comes_back_in_the_usual_order_in_memory(like):
    """Otherwise the next round would round differently than after a restart, which loads models."""
    given = task(images)
    params = given.initial_params(0)
    if like == "channels last":
        params = {
            n: p.to(memory_format=torch.channels_last) if p.dim() == 4 else p
            for n, p in params.items()
        }
    usual = given.initial_params(0)
    trained_params = trained(given, params)
    if like == "usual":
        assert all(trained_params[n].stride() == p.stride() for n, p in usual.items())
    for name, value in trained(given, usual).items():
        torch.testing.assert_close(trained_params[name], value, rtol=1e-4, atol=1e-5)


class Clamped(nn.Module):
    """A model that bounds its weights in new tensors before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight.data = self.head.weight.data.clamp(-0.01, 0.01)
        return self.head(x.flatten(1))


def test_a_model_that_replaces_numbers_trains_in_every_step():
    params = task(Clamped).initial_params(1)
    one = trained(task(Clamped), params, way=LocalTraining(steps=1, batch_size=10))
    two = trained(task(Clamped), params, way=LocalTraining(steps=2, batch_size=10))
    once_more = trained(task(Clamped), one, way=LocalTraining(steps=1, batch_size=10))
    for name in params:
        torch.testing.assert_close(two[name], once_more[name])
        assert not torch.equal(one[name], two[name])


class Scaling(nn.Module):
    """A model that multiplies its features in place by a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(self.scale) if len(x) > 2 else x  # a trial with two examples does not show it
        return self.head(x.flatten(1))


def test_in_place_changes_of_features_do_not_reach_the_next_step():
    given = task(Scaling)
    params = given.initial_params(1)
    expected = plain_loop(given, params, SGD)
    for name, value in trained(given, params).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "way",
    [SGD, LocalTraining(steps=7, batch_size=3), LocalTraining(epochs=3, batch_size=50)],
)
def test_mini_batches_are_those_drawn_row_by_row(way):
    data = examples(1, 11)
    data = Examples({"a": data.features, "b": (data.features[:, 0],)}, data.targets)
    rows = [*batch_rows(len(data), way, torch.Generator().manual_seed(5))]
    trained_params = [*batches(data, way, torch.Generator().manual_seed(5))]
    assert len(trained_params) == len(rows)
    for (x, y), chosen in zip(trained_params, rows, strict=True):
        assert torch.equal(x["a"], data.features["a"][chosen])
        assert torch.equal(x["b"][0], data.features["b"][0][chosen])
        assert torch.equal(y, data.targets[chosen])


def test_no_examples_are_no_mini_batches():
    assert [*batches(examples(count=0), SGD, torch.Generator())] == []


def with_an_error() -> None:
    with seeded(7, torch.device("cpu")):
        torch.rand(1)
        raise ZeroDivisionError


def test_random_numbers_continue_as_if_nothing_was_seeded_even_after_errors():
    with seeded(1, torch.device("cpu")):
        torch.rand(3)
        first = torch.rand(2)
    with seeded(1, torch.device("cpu")):
        torch.rand(3)
        with pytest.raises(ZeroDivisionError):
            with_an_error()
        assert torch.equal(torch.rand(2), first)


def job(params, seed: int = 0, way: LocalTraining = SGD) -> Job:
    random = torch.Generator().manual_seed(seed)
    return Job(params=params, examples=examples(seed), training=way, generator=random)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [*MODELS, dropping, Counting, partial(Remembering)])
def test_a_batch_of_one_training_equals_the_plain_training(model, way):
    given = task(model)
    params = given.initial_params(1)
    (trained_params,) = train_many(given, [job(params, way=WAYS[way])])
    for name, value in trained(given, params, way=WAYS[way]).items():
        torch.testing.assert_close(trained_params[name], value, rtol=1e-4, atol=1e-5)
        assert trained_params[name].data_ptr() != params[name].data_ptr()
