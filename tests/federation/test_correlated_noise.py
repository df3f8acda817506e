"""Runs with correlated noise: who is asked, what is released, and how they go on."""

import itertools
import math
import shutil
import stat

import numpy as np
import pytest
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg, Upcycled
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.storage.folder import Damaged
from flower_ext.federation.storage.noise_stream import FILE
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    CorrelatedNoise,
    Ledger,
    SpacedSampling,
    gaussian_loss,
)
from flower_ext.privacy.mechanisms.correlated_noise import PreparedNoise
from flower_ext.privacy.shared_ledger import total_spent
from flower_ext.training import LocalTraining, Task
from tests.support.dying_runs import CLIENTS, Died, DyingGrid, play
from tests.support.grids import grid
from tests.support.plans import release_plan
from tests.support.pulls import ONE_STEP, SIZE, client_data
from tests.support.travelling import Recorder

SGD = LocalTraining(epochs=1, batch_size=8, learning_rate=0.05)


def plan(sampling, rounds, correlation=None, **changes):
    fields = {"clipping_norm": 1.0, "delta": 1e-3, "noise_placement": "server", **changes}
    return release_plan(CLIENTS, sampling, rounds=rounds, correlation=correlation, **fields)


def still(width):
    """Return a task that moves parameters by nothing beside the noise."""
    return Task(
        model=lambda: nn.Linear(SIZE, width),
        data=lambda partition: client_data(1.0),
        loss=lambda outputs, targets: 1e-12 * outputs.sum(),
        metrics={},
        device="cpu",
    )


def models_of(correlation, sampling, rounds, *, task=None, engine=InProcessGrid, **changes):
    """Return the released models of a run as rows, the strategy and the grid."""
    task = task or still(100)
    strategy = FederatedStrategy(
        DPFedAvg(local=ONE_STEP), plan(sampling, rounds, correlation, **changes), evaluate_every=0
    )
    clients = engine(DPFedAvg.client_app(task), sampling.population)
    initial = ArrayRecord(task.initial_params(0))
    models = []

    def note(number, arrays):
        model = records.to_arrays(arrays)
        models.append(np.concatenate([model[n].ravel().astype(np.float64) for n in sorted(model)]))

    strategy.start(clients, initial, num_rounds=rounds, evaluate_fn=note)
    return np.array(models), strategy, clients


@pytest.mark.parametrize(
    ("rounds", "apart", "noise", "gain"),
    grid(
        [
            (40, 8, CorrelatedNoise(), 1.6),
            (500, 50, CorrelatedNoise(), 4.0),
            (500, 50, CorrelatedNoise(bands=16), 3.1),
        ],
        lambda case: case[0] == 40,
    ),
)
def test_sums_over_rounds_have_so_much_less_error_at_the_same_epsilon(rounds, apart, noise, gain):
    """Measured on the models that runs release, whose clients learn nothing."""
    sampling = SpacedSampling(apart, 1, apart, rounds // apart)
    errors, epsilons = [], []
    for correlation in (None, noise):
        models, strategy, _ = models_of(correlation, sampling, rounds)
        errors.append(np.sqrt(np.mean((models[1:] - models[0]) ** 2)))
        epsilons.append(strategy.guarantees()[0].epsilon)
        mechanism = strategy.run.mechanism
        expected = mechanism.strategy.model_error(rounds) * mechanism.noise_stddev
        assert errors[-1] == pytest.approx(expected, rel=0.3)
    assert errors[0] / errors[1] > gain
    assert epsilons == pytest.approx([gaussian_loss(1.0, releases=1, delta=1e-3).epsilon] * 2, 1e-2)


def failing(partition):
    """Return data of a client; every second one cannot load any."""
    if partition % 2:
        raise OSError("no disk")
    return client_data(1.0)


def test_clients_take_turns_and_one_that_fails_has_taken_its_turn():
    sampling = SpacedSampling(6, 2, 3, 2)
    task = Task(
        model=lambda: nn.Linear(SIZE, 1),
        data=failing,
        loss=lambda outputs, targets: outputs.sum(),
        metrics={},
        device="cpu",
    )
    _, strategy, clients = models_of(CorrelatedNoise(), sampling, 8, task=task, engine=Recorder)
    requests = {}
    for message in clients.sent:
        if message.metadata.message_type.startswith("train"):
            number = message.content.config_records[records.ROUND]["number"]
            requests.setdefault(message.metadata.dst_node_id, []).append(number)
    assert sorted(requests.values()) == [[1, 4], [1, 4], [2, 5], [2, 5], [3, 6], [3, 6]]
    assert set(strategy.participations.uploads.values()) == {2}
    # Rounds 7 and 8 asked nobody, and the guarantee is that of all participations.
    models = {g.view: g.epsilon for g in strategy.guarantees()}[AdversaryView.MODELS_AND_COHORTS]
    assert models <= gaussian_loss(1.0, releases=1, delta=1e-3).epsilon


@pytest.mark.parametrize("noise", [CorrelatedNoise(), CorrelatedNoise(bands=4)])
@pytest.mark.parametrize("at", ["questions", "answers"])
def test_a_seeded_run_continues_bit_for_bit(tmp_path, noise, at):
    options = {"method": DPFedAvg, "local": SGD, "memory": False}
    options["plan"] = plan(SpacedSampling(CLIENTS, 1, 2, 3), 5, noise)
    _, whole = play(tmp_path / "whole", **options)
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=4, at=at, **options)
    _, parts = play(tmp_path / "parts", **options)
    for name, array in whole.run.model.items():
        assert np.array_equal(parts.run.model[name], array)
    one, other = (tmp_path / name / "run" for name in ("whole", "parts"))
    model = "model.safetensors"
    assert (one / model).read_bytes() == (other / model).read_bytes()
    assert not (one / FILE).exists()  # the seed gives it again


SECURE = {"method": DPFedAvg, "local": SGD, "memory": False, "seeded_noise": False}
SHORT = {**SECURE, "plan": plan(SpacedSampling(CLIENTS, 1, 2, 3), 5, CorrelatedNoise())}


def test_a_secure_run_counts_what_was_begun_and_continues_after_it(tmp_path):
    with pytest.raises(Died):
        play(tmp_path, dies_in=4, **SHORT)
    state = tmp_path / "run" / FILE
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    _, strategy = play(tmp_path, **SHORT)
    assert strategy.participations.rounds == 6
    assert strategy.run.noise_stream._training_round == 6
    state.unlink()
    with pytest.raises(InvalidValue, match="of round 0: expected round 6"):
        play(tmp_path, rounds=6, **SHORT)


def test_the_key_file_encrypts_the_noise_of_the_server(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    play(tmp_path, state_key_file=key, **SHORT)
    assert (tmp_path / "run" / FILE).read_bytes().startswith(b"flower_ext sealed")
    key.chmod(0o644)
    with pytest.raises(InvalidValue, match="chmod 600"):
        play(tmp_path, rounds=6, state_key_file=key, **SHORT)


def test_secret_noise_is_in_no_other_file_of_the_run(tmp_path):
    """The newest noise is looked for in each file, in any of its forms of eight bytes."""
    _, strategy = play(tmp_path, **SHORT)
    noise = strategy.run.noise_stream._past.latest
    needles = [
        array.ravel()[:1].astype(kind).tobytes() for array in noise.values() for kind in "fd"
    ]
    needles += [repr(float(array.ravel()[0]))[:10].encode() for array in noise.values()]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    holding = {file.name for file in files if any(n in file.read_bytes() for n in needles)}
    assert holding == {"noise"}


APART, MOST = 2, 4


def secure_options(sampling=None, **changes):
    """Return options of a run with secure correlated noise for up to eight rounds."""
    sampling = sampling or SpacedSampling(CLIENTS, 1, APART, MOST)
    return {**SECURE, "plan": plan(sampling, 8, CorrelatedNoise(), **changes)}


class Asking(DyingGrid):
    """A grid that notes who trains in which round; nodes have other ids than in other grids."""

    asked: list
    first_id = 1_000

    def __init__(self, *args):
        super().__init__(*args)
        by_id = {}
        for partition, context in enumerate(self.contexts.values()):
            context.node_id = self.first_id + CLIENTS - partition
            by_id[context.node_id] = context
        self.contexts = by_id

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type.startswith("train"):
                number = message.content.config_records[records.ROUND]["number"]
                node = self.contexts[message.metadata.dst_node_id]
                self.asked.append((number, node.node_config["partition-id"]))
        return super().send_and_receive(messages, timeout=timeout)


def assert_apart(cohorts):
    """Check the participations that the noise was chosen for."""
    for client in range(CLIENTS):
        numbers = sorted(number for number, partition in cohorts if partition == client)
        assert len(numbers) <= MOST
        assert all(b - a >= APART for a, b in itertools.pairwise(numbers)), (client, numbers)


def test_a_client_whose_node_registers_anew_keeps_its_turn(tmp_path):
    requests = []
    for first_id, rounds in ((1_000, 2), (5_000, 5), (3_000, 8)):
        engine = type("Renumbered", (Asking,), {"asked": requests, "first_id": first_id})
        play(tmp_path, rounds=rounds, engine=engine, **secure_options())
    assert len(requests) == 8
    assert_apart(requests)


@pytest.mark.parametrize("lost", [1, 2])
def test_checkpoints_from_a_backup_make_no_client_take_part_too_early(tmp_path, lost):
    """A backup leaves out the secrets, as the guide asks. Two lost rounds cannot be made up."""
    requests = []
    engine = type("Noting", (Asking,), {"asked": requests})
    run, backup = tmp_path / "run", tmp_path / "backup"
    play(tmp_path, rounds=3, engine=engine, **secure_options())
    shutil.copytree(run / "checkpoints", backup)
    metrics = (run / "metrics.jsonl").read_bytes()
    play(tmp_path, rounds=3 + lost, engine=engine, **secure_options())
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(backup, run / "checkpoints")
    if lost > 1:
        with pytest.raises(Damaged, match=r"counts 3 training rounds, and metrics\.jsonl has 5"):
            play(tmp_path, rounds=8, engine=engine, **secure_options())
        (run / "metrics.jsonl").write_bytes(metrics)
        with pytest.raises(InvalidValue, match="of round 5: expected round 3"):
            play(tmp_path, rounds=8, engine=engine, **secure_options())
    else:
        play(tmp_path, rounds=8, engine=engine, **secure_options())
        assert {number for number, _ in requests} >= {1, 2, 3, 4, 5, 6, 7}
    assert_apart(requests)


def test_two_continuations_of_a_copied_run_share_no_noise_and_count_twice(tmp_path, monkeypatch):
    noises, add = [], PreparedNoise.add_gaussian

    def noting(self, update, stddev, *, grid=None):
        noises.append(np.concatenate([a.ravel() for _, a in sorted(self._left.items())]))
        return add(self, update, stddev, grid=grid)

    monkeypatch.setattr(PreparedNoise, "add_gaussian", noting)
    account = Budget(epsilon=1e6, delta=1e-3, ledger=tmp_path / "account.jsonl")
    options = {**secure_options(), "run_budget": account, "ledger": False}
    first, copy = tmp_path / "first", tmp_path / "copy"
    with pytest.raises(Died):  # the noise of round 4 is stored
        play(first, rounds=8, dies_in=4, **options)
    shutil.copytree(first, copy)
    (copy / "run" / ".lock").unlink(missing_ok=True)
    continued = [play(folder, rounds=7, **options)[1] for folder in (first, copy)]
    # Three rounds, then four of each continuation; nobody released the noise of the lost round.
    assert len(noises) == 3 + 2 * 4
    for one, other in itertools.combinations(np.array(noises), 2):
        assert not np.isclose(one, other, rtol=0, atol=1e-12).any()
    # Each reports what it spent alone. Row by row, both together move by no more than the account.
    moves = continued[0].run.mechanism.strategy.row_moves(
        8, rounds_apart=APART, participations=MOST
    )
    fresh = continued[0].run.mechanism.strategy.sensitivity(rounds_apart=APART, participations=MOST)
    joint = math.sqrt(moves[:4] @ moves[:4] + 2 * moves[4:] @ moves[4:]) / fresh
    together = gaussian_loss(1 / joint, releases=1, delta=1e-3).epsilon
    alone = max(strategy.guarantees()[0].epsilon for strategy in continued)
    entries = Ledger.read(tmp_path / "account.jsonl")
    assert alone < together * 0.9
    assert together * (1 - 1e-6) <= total_spent(entries, 1e-3) <= together * 1.01


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SpacedSampling(CLIENTS, 1, 1, MOST)},
        {"sampling": SpacedSampling(CLIENTS, 1, APART, MOST + 1)},
        {"noise_multiplier": 1.0001},
        {"clipping_norm": 0.5},
    ],
)
def test_a_run_continues_under_the_plan_alone_with_which_it_began(tmp_path, changes):
    play(tmp_path, rounds=2, **secure_options())
    with pytest.raises(InvalidValue, match="cannot continue with different settings"):
        play(tmp_path, rounds=8, **secure_options(**changes))
    play(tmp_path, rounds=3, **secure_options())


def test_upcycled_rounds_that_ask_nobody_use_no_place_of_the_noise():
    sampling = SpacedSampling(4, 1, 2, 3)
    base = FederatedStrategy(
        DPFedAvg(local=ONE_STEP), plan(sampling, 6, CorrelatedNoise()), evaluate_every=0
    )
    task = still(3)
    strategy = Upcycled(base, coefficient=0.5)
    grid = InProcessGrid(DPFedAvg.client_app(task), 4)
    strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=6)
    assert base.run.noise_stream._training_round == base.participations.rounds < 6
    assert math.isfinite(base.guarantees()[0].epsilon)
