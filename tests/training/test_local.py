"""Local training equals a plain loop of PyTorch, for each of its options."""

import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.errors import is_tellable
from flower_ext.training import (
    Job,
    LocalTraining,
    Proximal,
    Task,
    evaluate,
    scoring,
)
from flower_ext.training.local import perturbation, sgd_step
from flower_ext.training.params import clone
from flower_ext.training.problem import Linear, LocalProblem
from flower_ext.training.trials.single_rows import fewest_rows
from tests.support.grids import grid
from tests.support.jobs import batches, train_many, train_one


def by_hand(loss_at, start):
    cpu = torch.device("cpu")
    return LocalProblem(
        start=start, loss_at=loss_at, rest={}, device=cpu, preserved_buffers=nullcontext
    )


def minimise(problem, mini_batches, training):
    """Return the weights after a step for each mini-batch."""
    weights = clone(problem.start)
    step = sgd_step(problem, weights, training)
    for x, y in mini_batches:
        step(x, y)
    return weights


def examples(n: int = 30, features: int = 4, classes: int = 3, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        features=torch.randn(n, features, generator=generator),
        targets=torch.randint(classes, (n,), generator=generator),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.extractor(x)))


def task() -> Task:
    data = examples()
    return Task(model=Net, data=lambda i: ClientData(train=data, test=data), device="cpu")


def plain_sgd(params, data, training, seed):
    """Train by PyTorch's own SGD on the same batches."""
    model = Net()
    model.load_state_dict(params)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=training.learning_rate, momentum=training.momentum
    )
    for x, y in batches(data, training, torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def plain_sam(params, data, training, seed):
    """Train by SAM with .grad and in-place additions, with one norm over all parameters."""
    model = Net()
    model.load_state_dict(params)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=training.learning_rate, momentum=training.momentum
    )
    for x, y in batches(data, training, torch.Generator().manual_seed(seed)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        with torch.no_grad():
            climbed = [training.sam_radius * p.grad / norm for p in model.parameters()]
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.add_(e)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.sub_(e)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("training", "reference"),
    [
        (LocalTraining(epochs=3, batch_size=7, learning_rate=0.3, momentum=0.7), plain_sgd),
        (LocalTraining(steps=5, batch_size=8, learning_rate=0.3), plain_sgd),
        (
            LocalTraining(epochs=2, batch_size=7, learning_rate=0.3, momentum=0.5, sam_radius=0.2),
            plain_sam,
        ),
    ],
)
def test_training_equals_a_plain_torch_loop(training, reference):
    params = task().initial_params(seed=3)
    data = examples()
    ours = train_one(task(), params, data, training, generator=torch.Generator().manual_seed(5))
    theirs = reference(params, data, training, seed=5)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(expected, params[name])


def test_sam_step_on_a_quadratic_has_its_closed_form():
    """F(w) = ½ wᵀAw: the gradient at w + q Aw/‖Aw‖ is A(w + q Aw/‖Aw‖)."""
    curvature = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    start = {
        "a": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "b": torch.tensor([0.5], dtype=torch.float64),
    }

    def loss_at(params, x, y):
        w = torch.cat([params["a"], params["b"]])
        return 0.5 * w @ curvature @ w

    training = LocalTraining(steps=1, batch_size=1, learning_rate=0.01, sam_radius=0.3)
    one_step = batches(examples(n=1), training, torch.Generator())
    moved = minimise(by_hand(loss_at, start), one_step, training)
    w = torch.cat(list(start.values()))
    gradient = curvature @ w
    expected = w - 0.01 * curvature @ (w + 0.3 * gradient / gradient.norm())
    torch.testing.assert_close(torch.cat(list(moved.values())), expected)


def test_sam_perturbation_has_the_radius_over_the_whole_group():
    gradient = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    ascent = perturbation(gradient, radius=0.5)
    assert torch.cat([p.flatten() for p in ascent]).norm() == pytest.approx(0.5)
    assert float(ascent[0][0]) == pytest.approx(0.3)  # not 0.5: the norm is not per array


def test_sam_stays_finite_where_the_gradient_vanishes():
    assert all(torch.equal(p, torch.zeros(2)) for p in perturbation([torch.zeros(2)], 0.5))


def test_sam_perturbs_only_what_it_trains():
    params = task().initial_params(seed=3)
    training = LocalTraining(epochs=1, batch_size=30, learning_rate=0.1, sam_radius=0.4)
    moved = train_one(
        task(),
        params,
        examples(),
        training,
        trained=lambda name: name.startswith("extractor"),
        generator=torch.Generator(),
    )
    model = Net()
    model.load_state_dict(params)
    data = examples()
    shared = list(model.extractor.parameters())
    gradient = torch.autograd.grad(
        nn.functional.cross_entropy(model(data.features), data.targets), shared
    )
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    with torch.no_grad():
        for p, g in zip(shared, gradient, strict=True):
            p.add_(0.4 * g / norm)
    climbed = torch.autograd.grad(
        nn.functional.cross_entropy(model(data.features), data.targets), shared
    )
    torch.testing.assert_close(
        moved["extractor.weight"], params["extractor.weight"] - 0.1 * climbed[0]
    )
    assert torch.equal(moved["head.weight"], params["head.weight"])
    assert torch.equal(moved["head.bias"], params["head.bias"])


def test_training_leaves_its_inputs_untouched():
    params = task().initial_params(seed=3)
    before = {name: p.clone() for name, p in params.items()}
    train_one(task(), params, examples(), LocalTraining(), generator=torch.Generator())
    torch.testing.assert_close(params, before, rtol=0, atol=0)


def test_zero_epochs_change_nothing():
    params = task().initial_params(seed=3)
    moved = train_one(
        task(), params, examples(), LocalTraining(epochs=0), generator=torch.Generator()
    )
    torch.testing.assert_close(moved, params, rtol=0, atol=0)


def test_same_generator_seed_gives_same_batches_and_every_example_once_an_epoch():
    training = LocalTraining(epochs=2, batch_size=7)
    data = Examples(features=torch.arange(30.0)[:, None], targets=torch.arange(30))
    seen = [y for _, y in batches(data, training, torch.Generator().manual_seed(1))]
    again = [y for _, y in batches(data, training, torch.Generator().manual_seed(1))]
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))
    first, second = torch.cat(seen[:5]), torch.cat(seen[5:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(30))
    assert not torch.equal(first, second)


def test_proximal_term_pulls_towards_its_anchor_as_in_its_gradient():
    anchor = {"w": torch.tensor([1.0, 1.0])}
    w = torch.tensor([3.0, -1.0], requires_grad=True)
    value = Proximal(weight=0.5, anchor=anchor)({"w": w})
    assert float(value) == pytest.approx(0.25 * (4 + 4))
    (gradient,) = torch.autograd.grad(value, w)
    torch.testing.assert_close(gradient, 0.5 * (w.detach() - anchor["w"]))


def test_linear_term_adds_its_direction_to_the_gradient():
    params = task().initial_params(seed=3)
    training = LocalTraining(steps=1, batch_size=30, learning_rate=0.1)
    direction = {name: torch.full_like(p, 2.0) for name, p in params.items()}
    runs = [
        train_one(task(), params, examples(), training, terms=terms, generator=torch.Generator())
        for terms in ([], [Linear(direction=direction)])
    ]
    for name in params:
        torch.testing.assert_close(runs[0][name] - runs[1][name], 0.1 * direction[name])


def test_proximal_sgd_equals_a_hand_written_loop():
    """In FedProx, every step adds μ(w − w₀) to the gradient of the batch."""
    training = LocalTraining(
        epochs=3, batch_size=7, learning_rate=0.3, momentum=0.5, proximal_weight=0.8
    )
    params, data = task().initial_params(seed=3), examples()
    ours = train_one(task(), params, data, training, generator=torch.Generator().manual_seed(5))

    model = Net()
    model.load_state_dict(params)
    velocity = [torch.zeros_like(w) for w in model.parameters()]
    for x, y in batches(data, training, torch.Generator().manual_seed(5)):
        slopes = torch.autograd.grad(
            nn.functional.cross_entropy(model(x), y), list(model.parameters())
        )
        with torch.no_grad():
            for (name, w), slope, v in zip(model.named_parameters(), slopes, velocity, strict=True):
                v.mul_(0.5).add_(slope + 0.8 * (w - params[name]))
                w.sub_(0.3 * v)
    free = plain_sgd(params, data, training, seed=5)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(expected, free[name], atol=1e-3)  # the term has an effect


def test_a_proximal_weight_holds_only_trained_parameters():
    params, data = task().initial_params(seed=3), examples()
    training = LocalTraining(steps=1, batch_size=30, learning_rate=0.1, proximal_weight=100.0)
    moved = train_one(
        task(),
        params,
        data,
        training,
        trained=lambda name: name.startswith("head"),
        generator=torch.Generator(),
    )
    assert torch.equal(moved["extractor.weight"], params["extractor.weight"])
    # The term starts flat, so the first step equals that of plain SGD.
    plain = plain_sgd(params, data, training, seed=0)
    torch.testing.assert_close(moved["head.weight"], plain["head.weight"])


def ridge(dtype: torch.dtype = torch.float64) -> Task:
    """Return linear regression, whose proximal minimiser has a closed form."""
    data = Examples(features=examples().features, targets=examples().features @ torch.ones(4) + 2)
    return Task(
        model=lambda: nn.Linear(4, 1).to(dtype),
        data=lambda i: ClientData(train=data, test=data),
        loss=lambda outputs, y: (outputs.squeeze(1) - y).square().mean() / 2,
        metrics={},
        device="cpu",
    )


def proximal_ridge(params, data: Examples, weight: float, linear: torch.Tensor) -> torch.Tensor:
    """Return argmin of mean squared error / 2 + (μ/2)‖w − w₀‖² + ⟨n, w⟩, the bias last."""
    x = torch.cat([data.features, torch.ones(len(data), 1)], dim=1).double()
    anchor = torch.cat([params["weight"].flatten(), params["bias"]]).double()
    left = x.T @ x / len(data) + weight * torch.eye(5).double()
    return torch.linalg.solve(
        left, x.T @ data.targets.double() / len(data) + weight * anchor - linear
    )


def flat(params) -> torch.Tensor:
    return torch.cat([params["weight"].flatten(), params["bias"]])


def test_a_tolerance_trains_to_the_exact_minimiser_whatever_the_settings_of_sgd():
    params, data = ridge().initial_params(seed=1), ridge().data(0).train
    exact = proximal_ridge(params, data, 0.7, torch.zeros(5))
    for settings in ({}, {"epochs": 0}, {"steps": 3, "learning_rate": 50.0, "momentum": 0.9}):
        training = LocalTraining(tolerance=1e-10, proximal_weight=0.7, **settings)
        moved = train_one(ridge(), params, data, training, generator=torch.Generator())
        torch.testing.assert_close(flat(moved), exact, rtol=0, atol=1e-9)


def test_a_linear_term_moves_the_exact_minimiser_to_the_opposite_slope():
    params, data = ridge().initial_params(seed=1), ridge().data(0).train
    n = {"weight": torch.tensor([[1.0, -2.0, 0.5, 3.0]]).double(), "bias": torch.ones(1).double()}
    training = LocalTraining(tolerance=1e-10, proximal_weight=0.7)
    moved = train_one(
        ridge(), params, data, training, terms=[Linear(direction=n)], generator=torch.Generator()
    )
    exact = proximal_ridge(params, data, 0.7, flat(n))
    torch.testing.assert_close(flat(moved), exact, rtol=0, atol=1e-9)


def test_exact_training_keeps_the_models_precision_and_frozen_parts():
    params, data = ridge(torch.float32).initial_params(seed=1), ridge().data(0).train
    training = LocalTraining(tolerance=1e-10, proximal_weight=0.7)
    moved = train_one(ridge(torch.float32), params, data, training, generator=torch.Generator())
    assert {p.dtype for p in moved.values()} == {torch.float32}
    exact = proximal_ridge(params, data, 0.7, torch.zeros(5)).float()
    torch.testing.assert_close(flat(moved), exact, rtol=1e-6, atol=1e-7)

    half = train_one(
        ridge(torch.float32),
        params,
        data,
        training,
        trained=lambda name: name == "bias",
        generator=torch.Generator(),
    )
    assert torch.equal(half["weight"], params["weight"])
    residual = data.targets - data.features @ params["weight"][0]
    alone = (residual.mean() + 0.7 * params["bias"]) / 1.7
    torch.testing.assert_close(half["bias"], alone, rtol=1e-5, atol=1e-6)


def test_learning_rate_decays_by_round():
    training = LocalTraining(learning_rate=0.1, learning_rate_decay=0.99)
    assert training.in_round(1).learning_rate == pytest.approx(0.1)
    assert training.in_round(11).learning_rate == pytest.approx(0.1 * 0.99**10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", -1),
        ("steps", -1),
        ("batch_size", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate_decay", 1.5),
        ("momentum", 1.0),
        ("sam_radius", -0.1),
        ("sam_radius", float("inf")),
        ("proximal_weight", -0.1),
        ("proximal_weight", float("inf")),
        ("tolerance", -1e-9),
        ("tolerance", float("nan")),
    ],
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*expected"):
        LocalTraining(**{field: value})


def test_an_exact_minimiser_and_sharpness_aware_steps_exclude_each_other():
    with pytest.raises(ValueError, match="tolerance=1e-06: expected 0 with sam_radius=0.1"):
        LocalTraining(tolerance=1e-6, sam_radius=0.1)


def leaky(in_place):
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=in_place), nn.Linear(4, 3))


class Scaling(nn.Module):
    """A model that begins with a function in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(4, 3), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mul_(0.5) if self.in_place else x * 0.5)


IN_PLACE = pytest.mark.parametrize("model", [leaky, Scaling])
SEVERAL_LOOKS = pytest.mark.parametrize(
    "training",
    [
        LocalTraining(epochs=4, batch_size=64),
        LocalTraining(epochs=2, batch_size=8, sam_radius=0.2),
        LocalTraining(tolerance=1e-8, proximal_weight=0.1),
    ],
)


@IN_PLACE
@SEVERAL_LOOKS
@pytest.mark.parametrize("count", [1, 6])
def test_a_model_that_begins_in_place_sees_the_same_features_every_time(model, training, count):
    trained = []
    for in_place in (True, False):
        given = replace(task(), model=partial(model, in_place))
        jobs = [
            Job(
                params=given.initial_params(0),
                examples=examples(seed=client),
                training=training,
                generator=torch.Generator().manual_seed(client),
            )
            for client in range(count)
        ]
        trained.append(train_many(given, jobs))
    for one, other in zip(*trained, strict=True):
        for name, p in other.items():
            torch.testing.assert_close(one[name], p, rtol=1e-5, atol=1e-5)


@IN_PLACE
def test_evaluation_and_training_leave_the_examples_as_they_are(model, monkeypatch):
    given, data = replace(task(), model=partial(model, True)), examples()
    params = given.initial_params(0)
    monkeypatch.setattr(scoring, "_ROWS", 7)
    evaluate(given, params, data)
    training = LocalTraining(tolerance=1e-8, proximal_weight=0.1)
    double = Examples(data.features.double(), data.targets)
    train_one(given, params, double, training, generator=torch.Generator())
    assert torch.equal(data.features, examples().features)
    assert torch.equal(double.features, examples().features.double())


def test_selecting_nothing_to_train_is_an_error():
    params = task().initial_params(seed=3)
    with pytest.raises(ValueError, match="selects no parameter"):
        train_one(
            task(),
            params,
            examples(),
            LocalTraining(),
            trained=lambda name: False,
            generator=torch.Generator(),
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_training_equals_cpu_training():
    data = examples()
    params = task().initial_params(seed=3)
    on_gpu = Task(model=Net, data=lambda i: ClientData(train=data, test=data), device="cuda")
    training = LocalTraining(epochs=2, sam_radius=0.1, momentum=0.5)
    results = [
        train_one(t, params, data, training, generator=torch.Generator().manual_seed(2))
        for t in (task(), on_gpu)
    ]
    for name in params:
        torch.testing.assert_close(results[0][name], results[1][name].cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_say_how_far_a_constant_gradient_moves_the_model(momentum):
    training = LocalTraining(epochs=2, batch_size=4, learning_rate=0.01, momentum=momentum)
    x = torch.tensor([[1.0, -3.0]]).repeat(10, 1)
    moved = minimise(
        by_hand(lambda params, x, y: (x @ params["w"]).mean(), {"w": torch.zeros(2)}),
        batches(Examples(x, torch.zeros(10)), training, torch.Generator().manual_seed(0)),
        training,
    )
    expected = -0.01 * training.effective_steps(10) * x[0]
    torch.testing.assert_close(moved["w"], expected)
    assert momentum > 0 or training.effective_steps(10) == training.num_steps(10) == 6


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), None], ids=["a layer", "a function"])
def test_what_a_model_draws_by_itself_follows_the_generator_and_nothing_else(drop):
    class Dropping(nn.Linear):
        def forward(self, x):
            dropped = nn.functional.dropout(x, 0.5) if drop is None else drop(x)
            return super().forward(dropped)

    random = Task(model=lambda: Dropping(4, 3), data=lambda i: None, device="cpu")
    params, settings = random.initial_params(0), LocalTraining(epochs=2, batch_size=10)

    def trained(seed):
        generator = torch.Generator().manual_seed(seed)
        first = train_one(random, params, examples(), settings, generator=generator)
        return first["weight"], train_one(random, params, examples(), settings, generator=generator)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, again = trained(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other, _ = trained(5)
    assert torch.equal(one, other)
    assert not torch.equal(one, again["weight"])  # other masks, as other batches, next time
    assert not torch.equal(one, trained(6)[0])


def normalised():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class ByFunction(nn.Module):
    """Batch normalisation without a layer of that name."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.above(nn.functional.batch_norm(self.below(x), None, None, training=True))


def crumbs():
    """Return a norm over groups of one number, which PyTorch refuses for a single row."""
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("size", "sizes"), [(8, [8, 5, 4]), (4, [4, 4, 4, 3, 2]), (2, [*[2] * 7, 2, 2])]
)
def test_a_last_mini_batch_of_one_row_joins_the_previous_rows(size, sizes):
    training = LocalTraining(batch_size=size, epochs=2)
    data = examples(17)
    joined = [y for _, y in batches(data, training, torch.Generator(), fewest=2)]
    usual = [y for _, y in batches(data, training, torch.Generator())]
    assert [*map(len, joined)] == [*sizes, *sizes]
    assert len(joined) == len(usual) == training.num_steps(17)
    if size > 2:  # every example once an epoch, in the same order
        assert torch.equal(torch.cat(joined), torch.cat(usual))


class Picky(Net):
    """A model that refuses a single row, though it mixes no rows."""

    def forward(self, x):
        if len(x) == 1:
            raise ValueError("a single row")
        return super().forward(x)


@pytest.mark.parametrize(
    ("batch_size", "build"),
    grid(
        product([8, 4, 2], [normalised, ByFunction, crumbs, Picky]),
        {(8, ByFunction), (4, crumbs), (2, normalised), (2, Picky)}.__contains__,
    ),
)
def test_models_that_refuse_a_single_row_train_on_two_or_more(build, batch_size):
    loop_task = replace(task(), model=build)
    training = LocalTraining(batch_size=batch_size, epochs=2)

    def job(count):
        params, generator = loop_task.initial_params(0), torch.Generator().manual_seed(count)
        return Job(params=params, examples=examples(count), training=training, generator=generator)

    counts = [17, 9, 3, 2, 17, 9, 17, 17]
    together = train_many(loop_task, [job(count) for count in counts])
    for count, ours in zip(counts, together, strict=True):
        model = build()
        model.load_state_dict(loop_task.initial_params(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=training.learning_rate)
        generator = torch.Generator().manual_seed(count)
        for x, y in batches(examples(count), training, generator, fewest=2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        (alone,) = train_many(loop_task, [job(count)])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(ours[name], value)
            torch.testing.assert_close(alone[name], value)


def test_mini_batches_of_one_row_are_refused_with_the_layer():
    loop_task = replace(task(), model=normalised)
    training = LocalTraining(batch_size=1)
    start = loop_task.initial_params(0)
    expected = r"batch_size=1: expected at least 2, because layer '1' \(BatchNorm1d\) refuses"
    with pytest.raises(ValueError, match=expected) as refusal:
        train_one(loop_task, start, examples(5), training, generator=torch.Generator())
    assert is_tellable(refusal.value)


def test_models_that_take_a_single_row_keep_their_mini_batches():
    assert fewest_rows(task(), examples(17), 8) == 1
    assert fewest_rows(replace(task(), model=normalised), examples(18), 8) == 1


class Counting(nn.Module):
    """A model that counts its passes, and stores a trace of what it saw, travelling or not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.passes.add_(1.0)
        outputs = self.layer(x) + self.seen
        self.seen.add_(outputs.detach().mean(dim=0))
        return outputs


@pytest.mark.parametrize("build", [normalised, Counting])
@pytest.mark.parametrize("together", [1, 3])
def test_the_perturbed_pass_of_sam_moves_no_buffer(build, together):
    loop_task = replace(task(), model=build)
    training = LocalTraining(batch_size=8, epochs=2, sam_radius=0.3, learning_rate=0.1)
    start = loop_task.initial_params(0)
    jobs = [
        Job(
            params=start,
            examples=examples(24),
            training=training,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in range(together)
    ]
    for seed, trained in enumerate(train_many(loop_task, jobs)):
        model = build()
        model.load_state_dict(start)
        weights = [*model.parameters()]
        for x, y in batches(examples(24), training, torch.Generator().manual_seed(seed)):
            slope = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weights)
            other = deepcopy(model)  # its pass leaves the first one's buffers alone
            with torch.no_grad():
                ascent = perturbation(slope, training.sam_radius)
                for weight, climb in zip(other.parameters(), ascent, strict=True):
                    weight.add_(climb)
            loss = nn.functional.cross_entropy(other(x), y)
            for weight, part in zip(
                weights, torch.autograd.grad(loss, [*other.parameters()]), strict=True
            ):
                weight.data.sub_(part, alpha=training.learning_rate)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(trained[name], value)
