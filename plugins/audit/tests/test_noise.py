"""The noise of every mechanism, array by array, and its independence of all other noise.

Nobody learns here: the loss is zero and so is every update, so that what leaves a client, or what
the server releases, is noise alone. Of each array its variance must be the plan's, by a χ² test at
`LUCK`. Halves of arrays, arrays, clients, rounds and runs must not be correlated.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from scipy import stats
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import (
    FederatedStrategy,
    InProcessGrid,
    client_level_dp_mod,
    recorded_run,
)
from flower_ext.federation.client.assignment import objective_terms
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FullParticipation,
    ReleasePlan,
    SecureNoise,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.protections import ObjectivePerturbation
from flower_ext.training import LocalTraining, Task
from flower_ext_audit import Experiment, World, observe
from flower_ext_audit.mechanisms import MECHANISMS
from tests.support import planted_faults as faults
from tests.support.grids import grid
from tests.support.losing import Losing
from tests.support.strategies import strategy_of

ROUNDS, RUNS = 3, 2
LUCK = 1e-9
"""Probability with which one variance of right noise is refused; this module tests some hundred."""
MOST_CORRELATED = 7.0
"""Largest correlation of two vectors of n numbers, times √n: above with a probability of 3e-12."""
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


class Net(nn.Module):
    """Layers with biases as long as their weights, so that few draws tell their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 500), nn.Linear(500, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


INITIAL = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
TESTED = ("first.weight", "first.bias", "last.weight")
"""Arrays whose noise is tested; ``last.bias`` has one number."""


@dataclass(frozen=True)
class Expected:
    """Standard deviations of the noise on each upload and on each step of the model; 0 if none.

    With ``whole`` they are those of the whole model, in uploads and after rounds.
    """

    upload: float
    step: float
    whole: bool = False
    kurtosis: float = 3.0
    """Fourth moment of the noise in squared variances: 3 if it is Gaussian, 6 if Laplace's."""


EXPECTED = {
    "client-noise": Expected(0.5 / math.sqrt(2), 0.25),
    "server-noise": Expected(0.0, 0.25),
    "client-noise-mod": Expected(0.5 / math.sqrt(2), 0.25),
    "adaptive-clipping": Expected(0.5, 0.5 / math.sqrt(2)),
    "adaptive-clipping-server": Expected(0.0, 0.5 / math.sqrt(2)),
    "adaptive-clipping-secure-sum": Expected(0.0, math.sqrt(2) * 0.5 / 3),
    "secure-sum": Expected(0.0, 0.5 / 3),
    "secure-sum-mod": Expected(0.0, 0.5 / 3),
    "uldp-avg": Expected(0.5 / math.sqrt(2), 0.5 / 6),
    "uldp-sgd": Expected(0.5 / math.sqrt(2), 0.5 / 6),
    "uldp-secure-sum": Expected(0.0, 0.5 / 9),
    "uldp-avg-by-records": Expected(0.5 / math.sqrt(2), 0.5 / 6),
    "uldp-naive": Expected(math.sqrt(2), 1.0),
    "uldp-group": Expected(1.0, 1 / math.sqrt(2)),
    "client-noise-poisson": Expected(0.0, 3.0),
    "server-noise-poisson": Expected(0.0, 3.0),
    "ditto-uploads": Expected(1.0, 1.0, whole=True),
    "output-perturbation": Expected(1.0, 1.0, whole=True),
    "ditto-steps": Expected(0.7 * math.sqrt(2), 0.7 * math.sqrt(2)),
}
NOT_EXPECTED = {
    "correlated-noise": "tests of `correlated_noise`, because rounds share noise on purpose",
    "objective-perturbation": "`test_noise_in_the_objective_has_no_direction`",
    "secure-scores": "`test_masked_scores_have_their_noise_on_each_number`",
    "uldp-adaptive": "adaptive-clipping has the same noise, and uldp-avg the same sums",
    "uldp-adaptive-secure-sum": "adaptive-clipping-secure-sum has the same noise",
    "uldp-silos-draw": "uldp-secure-sum has the same noise, whoever draws users",
}
"""Mechanisms that `EXPECTED` lacks, each with where or why its noise is tested nevertheless."""


def data_of(name):
    """Return the records of a mechanism's partitions; their number is part of some plans."""
    x, y = torch.zeros(2, 1), torch.zeros(2)
    examples = Examples(x, y)
    if name.startswith("uldp"):
        owners = torch.tensor([0, 1] if name == "uldp-group" else [1, 1])
        return lambda partition: SiloData(train=examples, test=examples, owners=owners)
    return lambda partition: ClientData(train=examples, test=examples)


def still(name):
    """Return a task that moves parameters by nothing beside the noise."""
    return Task(
        model=Net,
        data=data_of(name),
        loss=lambda outputs, targets: 1e-12 * outputs.sum(),
        metrics={},
        device="cpu",
    )


def echo(task):
    """A ClientApp from elsewhere, behind the mod, that returns the model that it received."""
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message, context):
        return Message(message.content, reply_to=message)

    return app


def seen(name, runs=RUNS):
    """Return an adversary's observations of runs in which nobody learns."""
    of = MECHANISMS[name].experiment(rounds=ROUNDS)
    strategy = of.without.strategy
    app = echo if name.endswith("-mod") else strategy().method.client_app
    world = World(
        strategy=strategy, client_app=app(still(name)), num_clients=of.without.num_clients
    )
    experiment = Experiment(
        name=name,
        without=world,
        present=world,
        initial=ArrayRecord(INITIAL),
        score=lambda seen, view: 0.0,
        rounds=ROUNDS,
    )
    return [one for one, _ in observe(experiment, world, trials=runs)]


def uploads_in(observations, whole):
    """Return every client's upload of every round and run, or the ``whole`` model in it."""
    return [
        {name: array + (sent[node][name] if whole else 0.0) for name, array in examples.items()}
        for one in observations
        for sent, of_round in zip(one.sent, one.uploads, strict=True)
        for node, examples in of_round.items()
    ]


def steps_in(observations, whole):
    """Return by how much the model moved in every round and run, or the ``whole`` models."""
    both = [pair for one in observations for pair in pairwise(one.models)]
    return [after if whole else difference(before, after) for before, after in both]


def difference(before, after):
    return {name: after[name] - before[name] for name in before}


def check_variances(draws: Sequence[dict], stddev: float, names=TESTED, kurtosis=3.0):
    """Refuse draws of which an array has another variance than the plan's.

    The sum of n squares of noise with this kurtosis has the variance (kurtosis − 1) n, and that of
    Gaussian noise 2n. The χ² test is for the latter, so the sum's distance from n is scaled to it.

    Raises
    ------
    AssertionError
        The message names the array.
    """
    for name in names:
        numbers = np.concatenate([draw[name].ravel() for draw in draws])
        assert len(numbers) >= 1500  # else four fifths of the noise would not show
        surplus = float(numbers @ numbers) / stddev**2 - len(numbers)
        statistic = len(numbers) + surplus * math.sqrt(2 / (kurtosis - 1))
        low, high = stats.chi2.ppf([LUCK / 2, 1 - LUCK / 2], len(numbers))
        assert low < statistic < high, f"{name}: {statistic / len(numbers):.3f} of its variance"


def check_independence(draws: Sequence[dict], names=TESTED):
    """Refuse draws that are correlated, between rounds, clients, arrays or halves of arrays.

    Raises
    ------
    AssertionError
        Two vectors are correlated.
    """
    parts = [[half for n in names for half in np.split(d[n].ravel(), 2)] for d in draws]
    wholes = [np.concatenate(examples) for examples in parts]
    for vectors in (wholes, [half for examples in parts for half in examples]):
        rows = np.stack(vectors)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        most = float((np.abs(rows @ rows.T) - np.eye(len(rows))).max())
        assert most < MOST_CORRELATED / math.sqrt(rows.shape[1]), f"a correlation of {most:.2f}"


def check(name):
    """Check all noise of a mechanism."""
    observations, expected = seen(name), EXPECTED[name]
    steps = steps_in(observations, expected.whole)
    assert len(steps) == RUNS * ROUNDS
    check_variances(steps, expected.step, kurtosis=expected.kurtosis)
    check_independence(steps)
    if expected.upload:
        uploads = uploads_in(observations, expected.whole)
        assert len(uploads) == len(steps) * len(observations[0].uploads[0])
        check_variances(uploads, expected.upload, kurtosis=expected.kurtosis)
        check_independence(uploads)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_array_has_its_plans_noise_and_shares_none(name):
    check(name)


def test_the_noise_of_every_mechanism_is_expected_or_tested_elsewhere():
    assert MECHANISMS.keys() - EXPECTED.keys() == NOT_EXPECTED.keys()
    assert EXPECTED.keys() <= MECHANISMS.keys()


def test_planted_faults_reach_every_kind_of_noise():
    adding = {name for name in vars(NoiseSource) if name.startswith("add_")}
    assert adding == set(faults.NOISES)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_the_variance_test_allows_for_the_kurtosis_of_the_noise(factor):
    rng = np.random.default_rng(1)
    draws = [{"w": factor * rng.laplace(0.0, 1.0, 60_000)}]
    if factor == 1.0:
        check_variances(draws, math.sqrt(2), ["w"], kurtosis=6.0)
    else:
        with pytest.raises(AssertionError, match="of its variance"):
            check_variances(draws, math.sqrt(2), ["w"], kurtosis=6.0)


EIGHTY = faults.less_noise_on("bias", 1.25)
PLANTED = {
    **{f"{name}, less on biases": (name, EIGHTY) for name in EXPECTED},
    **{
        f"{name}, one stream for all arrays": (name, faults.one_stream_for_all_arrays)
        for name in ("client-noise", "server-noise", "client-noise-mod", "uldp-avg")
    },
    "server-noise, reused": ("server-noise", faults.server_noise_reused),
}


DAILY = {
    "client-noise, less on biases",
    "client-noise-mod, less on biases",
    "server-noise, less on biases",
    "secure-sum, less on biases",
    "ditto-uploads, less on biases",
    "client-noise, one stream for all arrays",
    "server-noise, reused",
}
"""A fault of each kind, and each kind of noise: `make test-all` plants all."""


@pytest.mark.parametrize(
    ("name", "plant"),
    grid([pytest.param(*fault, id=name) for name, fault in PLANTED.items()], DAILY.__contains__),
)
def test_a_planted_fault_of_the_noise_is_found(name, plant, monkeypatch):
    plant(monkeypatch, None)
    with pytest.raises(AssertionError, match=r"of its variance|a correlation of"):
        check(name)


CLIENTS = 4
MASKED = {
    # Among so few, half may only be lost if the server tells everybody the same.
    "noise_placement": SecureSum(colluding=0.0, dropouts=0.5, resist_equivocation=False)
}
SUMS = {
    "clients noise": {},
    "clients noise, two are lost": {},
    "the server noises": {"noise_placement": "server"},
    "masked sum": MASKED,
    "masked sum, two are lost": MASKED,
}
SURPLUS = math.sqrt(2)
"""Every masked sum has four shares of noise, of which two are enough."""


def models_of(name, folder=None, *, rounds=ROUNDS, **options):
    """Return the model after each round of a run, in standard deviations of a round's noise."""
    terms = {"clipping_norm": 0.5, "noise_multiplier": 2.0, "rounds": 9, "delta": 1e-5}
    plan = ReleasePlan(sampling=FullParticipation(CLIENTS), **{**terms, **SUMS[name]})
    stddev = plan.mechanism().noise_stddev / CLIENTS * (SURPLUS if "masked" in name else 1.0)
    models = {}

    def note(number, arrays):
        wide = records.to_arrays(arrays).items()
        models[number] = {n: array.astype(np.float64) / stddev for n, array in wide}

    def start(directory=None):
        strategy = strategy_of(
            DPFedAvg, plan=plan, local=ONE_STEP, evaluate_every=0, directory=directory, **options
        )
        app = DPFedAvg.client_app(still(name), allow_seeded_noise=True)
        nodes = Losing(app, CLIENTS)
        lost = (1, 2) if "lost" in name else ()
        nodes.answers = frozenset((client, "train") for client in lost)
        strategy.start(nodes, ArrayRecord(INITIAL), num_rounds=rounds, evaluate_fn=note)

    if folder is None:
        start()
    else:
        with recorded_run({"run-directory": str(folder), "resume": True}, "still") as run:
            start(run)
    return models


def steps_between(models):
    """Return by how much each round moved the model."""
    return [difference(models[n], models[n + 1]) for n in sorted(models) if n + 1 in models]


@pytest.mark.parametrize(
    ("name", "seeded"),
    grid(
        product(SUMS, [False, True]),
        lambda case: case[1] == (case[0] in ("clients noise", "masked sum")),
    ),
)
def test_rounds_have_independent_noise_whoever_adds_it_or_drops_out(name, seeded):
    steps = steps_between(models_of(name, seed=3, seeded_noise=seeded))
    assert len(steps) == ROUNDS
    check_variances(steps, 1.0)
    check_independence(steps)


@pytest.mark.parametrize("seeded", [False, True], ids=["secure", "seeded"])
@pytest.mark.parametrize("name", [name for name in SUMS if "server" in name or "lost" in name])
def test_noise_of_the_server_that_is_reused_is_found(name, seeded, monkeypatch):
    faults.server_noise_reused(monkeypatch, None)
    steps = steps_between(models_of(name, seed=3, seeded_noise=seeded))
    with pytest.raises(AssertionError, match="a correlation of"):
        check_independence(steps)


@pytest.mark.parametrize(
    "name", grid(SUMS, lambda name: name not in ("clients noise", "masked sum"))
)
def test_secure_noise_is_new_in_every_run_that_resumes_or_repeats_another(name, tmp_path):
    first = models_of(name, tmp_path / "first", rounds=2, seed=3)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    steps = steps_between(first)
    for resumed in ("first", "second"):
        later = models_of(name, tmp_path / resumed, rounds=4, seed=3)
        steps += steps_between({2: first[2], **later})
    steps += steps_between(models_of(name, rounds=2, seed=3))
    assert len(steps) == 2 + 2 + 2 + 2
    check_independence(steps)


def test_masked_scores_have_their_noise_on_each_number(monkeypatch):
    names = tuple((f"score{number}", 0.0, 1.0) for number in range(599))
    shown = SecureScores(noise_multiplier=1.0, times=ROUNDS, bounds=names)
    totals = []
    monkeypatch.setattr(
        SecureScores, "answer", lambda self, total, stddev: totals.append(total) or {}
    )
    plan = ReleasePlan(
        sampling=FullParticipation(3),
        clipping_norm=0.5,
        noise_multiplier=1.0,
        rounds=ROUNDS,
        delta=1e-5,
        noise_placement=SecureSum(colluding=0.0, dropouts=0.0),
        queries=(shown,),
    )
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0))
    task = replace(
        still(""),
        data=lambda _: ClientData(train=Examples(torch.zeros(1, 1), torch.zeros(1)), test=nothing),
    )
    strategy = FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=1)
    grid = InProcessGrid(DPFedAvg.client_app(task), 3)
    strategy.start(grid, ArrayRecord(INITIAL), num_rounds=ROUNDS)
    draws = [{"scores": total} for total in totals]
    check_variances(draws, shown.norm, names=["scores"])
    check_independence(draws, names=["scores"])


def test_noise_in_the_objective_has_no_direction():
    params = {name: value for name, value in INITIAL.items() if name in TESTED}
    protection = ObjectivePerturbation(rate=2.0, least_examples=0)
    draws = [objective_terms(params, 1, protection, SecureNoise()) for _ in range(8)]
    arrays = [{name: part.numpy() for name, part in one.direction.items()} for (one,) in draws]
    check_independence(arrays)
    norms = [math.sqrt(sum(float((part**2).sum()) for part in one.values())) for one in arrays]
    size = sum(value.numel() for value in params.values())
    low, high = stats.gamma.ppf([LUCK / 2, 1 - LUCK / 2], size, scale=1 / 2.0)
    assert all(low < norm < high for norm in norms)
    for one, norm in zip(arrays, norms, strict=True):
        for part in one.values():
            share = float((part**2).sum()) / norm**2
            law = stats.beta(part.size / 2, (size - part.size) / 2)
            assert law.ppf(LUCK / 2) < share < law.ppf(1 - LUCK / 2)
