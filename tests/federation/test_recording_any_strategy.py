"""One line gives a strategy in any ServerApp a run directory, from which the run can be resumed."""

import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM
from safetensors.numpy import load_file

from flower_ext.algorithms import DPFedAvg, FedDyn, Hosted, Upcycled
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid, recorded
from flower_ext.files import InUse, lock
from flower_ext.privacy import (
    Budget,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    PoissonSampling,
)
from flower_ext.privacy.study_composition import total_spent
from flower_ext.runs import NotARun, RunDirectory, RunWriter, directory
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import LocalTraining
from tests.support.grids import grid as grid_of
from tests.support.recorded_runs import CLIENTS, plan, play
from tests.support.worlds import task

NO_PRIVACY = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
SEEDED = {"seed": 1, "seeded_noise": True}


@pytest.mark.report
@pytest.mark.figures
def test_the_directory_holds_all_that_an_app_of_ours_leaves(tmp_path, capsys, caplog):
    caplog.set_level("INFO", logger="flwr")
    run, strategy, result = play(tmp_path / "run", rounds=3)
    assert run.status == "completed"
    assert [row["round"] for row in run.metrics()] == [1, 2, 3]
    assert run.guarantees() == strategy.guarantees() != []
    assert [entry["kind"] for entry in run.ledger()] == ["reserve", "commit"] * 3
    assert len(run.client_metrics()) == CLIENTS
    saved = load_file(run.path / "model.safetensors")
    for name, array in saved.items():
        np.testing.assert_array_equal(array, result.arrays[name].numpy())
    for name in ("report.html", "report.md", "use.json", "checkpoints/3.checkpoint"):
        assert (run.path / name).is_file()
    output = capsys.readouterr().out.splitlines()
    assert output == [f"Report: {run.path / 'report.html'}"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == f"Run directory: {run.path}"
    assert len(messages) <= 6  # one line per round, and three more
    assert (run.path / "report.md").read_text().startswith("# DPFedAvg\n")


def test_the_record_holds_the_settings_that_identify_the_run(tmp_path):
    run, *_ = play(tmp_path / "run", rounds=1, wrap=lambda base: Upcycled(base, 0.25))
    assert run.config["method"] == "Upcycled-DPFedAvg"
    assert (run.config["clipping-norm"], run.config["noise-multiplier"]) == (0.5, 3.0)
    assert (run.config["rounds"], run.config["planned-rounds"]) == (1, 4)
    assert run.config["coefficient"] == 0.25
    assert "epochs=1" in run.config["training-local"]
    json.dumps(run.config)


@pytest.mark.parametrize(
    ("dies_in", "at"),
    grid_of(
        product([1, 3], ["questions", "answers"]), {(1, "questions"), (3, "answers")}.__contains__
    ),
)
def test_a_seeded_run_that_died_ends_as_if_it_had_not(tmp_path, dies_in, at):
    whole, expected, _ = play(tmp_path / "whole", **SEEDED)
    play(tmp_path / "parts", dies_in=dies_in, at=at, **SEEDED)
    parts, strategy, _ = play(tmp_path / "parts", **SEEDED)
    model = "model.safetensors"
    assert (parts.path / model).read_bytes() == (whole.path / model).read_bytes()
    assert [g.epsilon for g in strategy.guarantees()] == [g.epsilon for g in expected.guarantees()]
    assert [row["round"] for row in parts.metrics()] == [1, 2, 3, 4]
    assert len(parts.metadata["starts"]) == 2


def test_an_unseeded_run_that_died_counts_the_round_that_was_given_up(tmp_path):
    play(tmp_path / "run", dies_in=3)
    run, strategy, _ = play(tmp_path / "run")
    assert strategy.participations.rounds == 5
    assert sum(entry["kind"] == "reserve" for entry in run.ledger()) == 5
    assert run.status == "completed"


@pytest.mark.report
def test_a_run_that_died_says_so_with_a_report(tmp_path):
    run, *_ = play(tmp_path / "run", dies_in=2)
    assert run.status == "failed"
    assert run.metadata["reason"].startswith("Died")
    assert "This run is failed" in (run.path / "report.md").read_text(encoding="utf-8")


def test_a_run_that_failed_before_its_first_round_may_begin_again(tmp_path):
    strategy = FederatedStrategy(DPFedAvg(), plan(), timeout=0.1)
    alone = InProcessGrid(DPFedAvg.client_app(task()), num_clients=1)
    start = recorded(strategy, tmp_path / "run")
    with pytest.raises(RuntimeError, match="1 of 3 nodes connected"):
        start.start(alone, ArrayRecord(task().initial_params(0)))
    assert not (tmp_path / "run" / "report.html").exists()
    run, *_ = play(tmp_path / "run", rounds=2, local=DPFedAvg().local)
    assert [row["round"] for row in run.metrics()] == [1, 2]


def test_a_complete_run_is_never_restarted_but_continued_beyond_its_end(tmp_path):
    play(tmp_path / "run", rounds=2, **SEEDED)
    with pytest.raises(InvalidValue, match=r"complete, after 2 rounds: .* a different name"):
        play(tmp_path / "run", rounds=2, **SEEDED)
    longer, *_ = play(tmp_path / "run", rounds=4, **SEEDED)
    whole, *_ = play(tmp_path / "whole", rounds=4, **SEEDED)
    model = "model.safetensors"
    assert (longer.path / model).read_bytes() == (whole.path / model).read_bytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": plan(clipping_norm=0.25)}, r"clipping-norm=0\.25 \(it began with 0\.5\)"),
        ({"plan": plan(noise_multiplier=2.0)}, r"noise-multiplier=2\.0 \(it began with 3\.0\)"),
        (
            {"plan": plan(sampling=PoissonSampling(population=CLIENTS, rate=0.5))},
            r"sampling='PoissonSampling\(population=3, rate=0\.5\)'",
        ),
        ({"plan": NO_PRIVACY}, "plan='NonPrivatePlan'"),
        ({"seed": 2}, r"seed=2 \(it began with 0\)"),
        ({"local": LocalTraining(epochs=3)}, "training-local=.*epochs=3"),
        ({"model": {"other": torch.zeros(3)}}, r"parameters=3 \(it began with 92\)"),
        ({"wrap": Upcycled}, "coefficient=.*method='Upcycled-DPFedAvg'"),
    ],
    ids=["clip", "noise", "sampling", "plan", "seed", "training", "model", "wrapper"],
)
def test_another_run_under_the_same_name_is_refused_by_what_differs(tmp_path, changes, named):
    play(tmp_path / "run", dies_in=2)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UnfitSetting, match=f"cannot continue with different settings: .*{named}"):
        play(tmp_path / "run", **changes)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@dataclass(frozen=True, kw_only=True)
class OwnDelta(DPFedAvg):
    """A method with a field that has the name of the plan's δ."""

    delta: float = 0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": plan(delta=1e-3)}, r"\bdelta=0\.001"),
        ({"delta": 0.9}, r"method-delta=0\.9"),
        ({"disclosures": ()}, r"disclosures=None"),
    ],
)
def test_no_term_hides_another_of_its_name(tmp_path, changes, named):
    terms = {"method": OwnDelta, "disclosures": ["a pilot run"]}
    play(tmp_path / "run", dies_in=2, **terms)
    with pytest.raises(UnfitSetting, match=named):
        play(tmp_path / "run", **{**terms, **changes})


class Decaying(Upcycled):
    """A wrapper with a setting of its own."""

    def __init__(self, base, decay):
        super().__init__(base)
        self.decay = decay


def test_a_run_is_refused_with_another_setting_of_its_wrapper(tmp_path):
    play(tmp_path / "run", dies_in=3, wrap=lambda base: Decaying(base, 0.5))
    with pytest.raises(UnfitSetting, match=r"decay=0\.9 \(it began with 0\.5\)"):
        play(tmp_path / "run", wrap=lambda base: Decaying(base, 0.9))


@pytest.mark.parametrize(
    ("method_of", "named"),
    [
        (
            lambda number: FedDyn(regularization=number),
            r"regularization=0\.9 \(it began",
        ),
        (
            lambda number: Hosted(FedAvgM(server_momentum=number)),
            r"strategy=.*server_momentum=0\.9",
        ),
    ],
    ids=["method", "hosted server"],
)
def test_another_number_of_the_method_is_refused(tmp_path, method_of, named):
    model = ArrayRecord(task().initial_params(0))

    def start(number, rounds):
        strategy = FederatedStrategy(method_of(number), NO_PRIVACY, evaluate_every=0)
        grid = InProcessGrid(type(strategy.method).client_app(task()), CLIENTS)
        recorded(strategy, tmp_path / "run").start(grid, model, num_rounds=rounds)

    start(0.1, 1)
    with pytest.raises(UnfitSetting, match=f"cannot continue with different settings: .*{named}"):
        start(0.9, 2)


def test_arrays_of_other_shapes_and_the_same_size_are_refused(tmp_path):
    play(tmp_path / "run", dies_in=2)
    model = {name: param.flatten() for name, param in task().initial_params(0).items()}
    with pytest.raises(InvalidValue, match="the model differs"):
        play(tmp_path / "run", model=model)


def test_a_folder_with_other_files_and_one_in_use_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "lock", partial(lock, seconds=0.1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(NotARun, match="not empty"):
        play(tmp_path / "mine")
    play(tmp_path / "run", dies_in=2)
    other = RunWriter.resume(tmp_path / "run")
    with pytest.raises(InUse, match="in use by process"):
        play(tmp_path / "run")
    other.close()


def test_relative_names_lie_in_the_runs_folder_and_empty_ones_are_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWER_EXT_RUNS", raising=False)
    assert play("mine", rounds=1)[0].path == tmp_path / "runs" / "mine"
    monkeypatch.setenv("FLOWER_EXT_RUNS", str(tmp_path / "elsewhere"))
    assert play("mine", rounds=1)[0].path == tmp_path / "elsewhere" / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert play("~/at-home", rounds=1)[0].path == tmp_path / "at-home"
    unnamed = [play("", rounds=1)[0].path for _ in range(2)]
    assert len(set(unnamed)) == 2
    assert {path.parent for path in unnamed} == {tmp_path / "elsewhere"}
    assert all("DPFedAvg" in path.name for path in unnamed)


def test_wrapped_and_hosted_strategies_are_recorded(tmp_path):
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    hosted = FederatedStrategy(
        Hosted(FedAvgM(min_train_nodes=3, min_available_nodes=3)), NO_PRIVACY
    )
    recorded(Upcycled(hosted, 0.5), tmp_path / "run").start(
        grid, ArrayRecord(task().initial_params(0)), num_rounds=4
    )
    run = RunDirectory.open(tmp_path / "run")
    assert run.config["method"] == "Upcycled-Hosted-FedAvgM"
    assert [row["messages"] for row in run.metrics()] == [6, 0, 6, 0]
    assert not run.ledger_path.exists()
    assert run.guarantees() == []


def test_upcycled_runs_that_died_in_a_silent_round_go_on(tmp_path):
    facts = {"wrap": lambda base: Upcycled(base, 0.5), "rounds": 5, **SEEDED}
    whole, *_ = play(tmp_path / "whole", **facts)
    play(tmp_path / "parts", dies_in=3, **facts)
    parts, *_ = play(tmp_path / "parts", **facts)
    model = "model.safetensors"
    assert (parts.path / model).read_bytes() == (whole.path / model).read_bytes()


@pytest.mark.parametrize("strategy", [FedAvg(), Upcycled(FedAvg(), 0.5)], ids=["alone", "wrapped"])
def test_a_strategy_of_flower_is_refused_with_the_class_that_records_it(strategy, tmp_path):
    with pytest.raises(InvalidValue, match=r"strategy=FedAvg: expected .*Hosted"):
        recorded(strategy, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_ends_the_run_and_another_start_does_not_spend_more(tmp_path):
    budget = Budget(epsilon=0.6, delta=0.01)
    run, strategy, _ = play(tmp_path / "run", rounds=9, budget=budget)
    assert run.status == "budget-exhausted"
    spent = strategy.participations.rounds
    assert 1 <= spent < 9
    again, strategy, _ = play(tmp_path / "run", rounds=9, budget=budget)
    assert again.status == "budget-exhausted"
    assert strategy.participations.rounds == spent


def test_a_run_that_an_account_lacks_does_not_join_it(tmp_path):
    """The account would count the later rounds alone, and leave too much of the budget."""
    budget = Budget(epsilon=9.0, delta=0.01, ledger=tmp_path / "account.jsonl")
    play(tmp_path / "run", rounds=2)
    with pytest.raises(InvalidValue, match="has 0 of at least 1 training rounds"):
        play(tmp_path / "run", rounds=3, budget=budget)
    assert not budget.ledger.exists()
    play(tmp_path / "charged", rounds=2, budget=budget, dies_in=2)
    _, strategy, _ = play(tmp_path / "charged", rounds=3, budget=budget)
    assert strategy.participations.rounds == 4  # with the round that was given up
    total = total_spent(Ledger.read(budget.ledger), 0.01)
    assert total == pytest.approx(strategy.guarantees()[1].epsilon)
    budget.ledger.unlink()
    with pytest.raises(InvalidValue, match="has 0 of at least 1 training rounds"):
        play(tmp_path / "charged", rounds=4, budget=budget)


def test_a_strategy_is_recorded_once(tmp_path):
    another_directory = RunWriter.create(tmp_path / "own", config={})
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    initial = ArrayRecord(task().initial_params(0))
    with pytest.raises(InvalidValue, match="already writes to this directory"):
        recorded(
            FederatedStrategy(DPFedAvg(), plan(), directory=another_directory), tmp_path / "run"
        ).start(grid, initial)
    strategy = FederatedStrategy(DPFedAvg(), plan(), timeout=5.0)
    strategy.start(grid, initial, num_rounds=1)
    with pytest.raises(InvalidValue, match="has not run yet; create a new one"):
        recorded(strategy, tmp_path / "other").start(grid, initial)


def test_no_recording_begins_after_a_release_outside_any_round(tmp_path):
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    initial = ArrayRecord(task().initial_params(0))
    asked = FederatedStrategy(DPFedAvg(), plan(), timeout=5.0)
    asked.configure_train(1, initial, ConfigRecord(), grid)
    answered = FederatedStrategy(DPFedAvg(), plan(), timeout=5.0)
    answered.participations.record_answer("labels", [0], in_sum=1.0, in_upload=1.0)
    for number, strategy in enumerate((asked, answered)):
        with pytest.raises(InvalidValue, match="has not run yet; create a new one"):
            recorded(strategy, tmp_path / str(number)).start(grid, initial)


def test_the_path_is_known_before_round_one_and_may_be_text(tmp_path):
    start = recorded(FederatedStrategy(DPFedAvg(), plan()), str(tmp_path / "run"))
    assert start.directory is None
    assert not Path(tmp_path / "run").exists()
