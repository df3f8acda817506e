"""Resumed runs: a new strategy and a new grid continue, as a new process would."""

import json
import multiprocessing
import os
import resource
import shutil
import stat
import traceback
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from flower_ext import runs
from flower_ext.algorithms import DPFedAvg, FedDyn, FedPer, FedRep
from flower_ext.federation import (
    Adam,
    ExponentialAverage,
    FederatedStrategy,
    FederationNotReady,
    recorded_run,
)
from flower_ext.federation.storage.folder import Damaged
from flower_ext.files import InUse, lock
from flower_ext.privacy import (
    AdaptiveClipping,
    Budget,
    FixedSizeSampling,
    FullParticipation,
    LedgerCorrupt,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
)
from flower_ext.runs import RunDirectory, RunWriter, directory, write_report
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import LocalTraining
from tests.support.dying_runs import CLIENTS, Died, DyingGrid, assert_same_model, plan, play
from tests.support.grids import grid
from tests.support.strategies import strategy_of
from tests.support.worlds import task

SGD = LocalTraining(epochs=1, batch_size=8, learning_rate=0.05)


def rows(run: RunDirectory):
    return [{n: v for n, v in row.items() if not n.endswith("seconds")} for row in run.metrics()]


def assert_same(one: RunDirectory, other: RunDirectory) -> None:
    """Assert that two runs have the same model, metrics, guarantees and scores."""
    assert_same_model(one, other)
    assert rows(one) == rows(other)
    assert one.guarantees() == other.guarantees()
    assert one.client_metrics() == other.client_metrics()
    assert sum(row["answered"] for row in one.metrics()) > 0
    assert one.metadata["summary"]["refused"] == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "write_report", lambda run: run.path)
        return play(tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("at", ["questions", "answers"])
@pytest.mark.parametrize("dies_in", grid([1, 3, 5], lambda dies_in: dies_in == 3))
def test_a_seeded_run_resumes_as_if_nothing_had_happened(whole, tmp_path, dies_in, at):
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=dies_in, at=at)
    parts, _ = play(tmp_path / "parts")
    assert_same(parts, whole)
    kinds = [entry["kind"] for entry in parts.ledger()]
    assert kinds.count("reserve") == 5
    assert kinds.count("repeat") == 1


def test_an_optimizers_moments_and_an_average_resume_bit_for_bit(tmp_path):
    server, average = Adam(learning_rate=0.05, tau=0.1), ExponentialAverage(decay=0.5)
    options = {"method": DPFedAvg, "local": SGD, "memory": False}
    options |= {"server": server, "average": average}
    whole, _ = play(tmp_path / "whole", **options)
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=3, **options)
    parts, _ = play(tmp_path / "parts", **options)
    assert_same(parts, whole)


def test_an_adaptive_clipping_norm_resumes_bit_for_bit(tmp_path):
    clipping = AdaptiveClipping(initial_norm=0.01, quantile=0.7, learning_rate=1.0)
    options = {"method": DPFedAvg, "local": SGD, "memory": False}
    options |= {"plan": plan(clipping_norm=clipping)}
    whole, strategy = play(tmp_path / "whole", **options)
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=3, **options)
    parts, resumed = play(tmp_path / "parts", **options)
    assert_same(parts, whole)
    assert len({row["adaptive_norm"] for row in parts.metrics()}) == 5
    assert resumed.run.mechanism == strategy.run.mechanism


def test_a_run_may_die_and_resume_repeatedly(whole, tmp_path):
    for dies_in in (2, 2, 3, 5):
        with pytest.raises(Died):
            play(tmp_path / "parts", dies_in=dies_in)
    parts, _ = play(tmp_path / "parts")
    assert_same(parts, whole)
    starts = parts.metadata["starts"]
    assert [start.get("after_round") for start in starts] == [None, 1, 1, 2, 4]
    write_report(parts)
    assert "Resumed after round 1, 1, 2, 4" in (parts.path / "report.md").read_text(
        encoding="utf-8"
    )


def test_an_ended_run_resumes_to_a_later_end_with_its_plans_noise(tmp_path):
    play(tmp_path / "parts", rounds=2)
    parts, strategy = play(tmp_path / "parts", rounds=5)
    whole, _ = play(tmp_path / "whole", rounds=5)
    assert parts.config["rounds"] == 2
    assert_same_model(parts, whole)
    assert strategy.participations.rounds == 5


def test_a_run_at_its_end_needs_nobody_to_state_its_outcome_again(tmp_path):
    before, _ = play(tmp_path, rounds=2)
    facts = rows(before), before.guarantees()
    (before.path / "guarantee.json").unlink()
    again, strategy = play(tmp_path, rounds=2, memory=False)
    assert (rows(again), again.guarantees()) == facts
    assert strategy.run.clients.nodes == {}


def test_with_secure_noise_an_abandoned_round_counts_and_uses_up_its_number(
    tmp_path,
):
    secure = {"seeded_noise": False, "plan": plan(sampling=FixedSizeSampling(CLIENTS, 3))}
    for dies_in, at in ((3, "questions"), (3, "answers"), (3, "answers"), (3, "answers")):
        with pytest.raises(Died):
            play(tmp_path, dies_in=dies_in, at=at, **secure)
    run, strategy = play(tmp_path, **secure)
    assert strategy.participations.rounds == 9
    kinds = [entry["kind"] for entry in run.ledger()]
    assert [kinds.count(kind) for kind in ("reserve", "commit", "discard")] == [9, 5, 4]
    begun = [json.loads(line) for line in (run.path / "checkpoints/begun.jsonl").open()]
    numbers = [line["training"] for line in begun if "units" in line]
    assert numbers == list(range(1, 10))
    uploads = [unit for line in begun if "units" in line for unit in line["units"]]
    assert {u: uploads.count(u) for u in set(uploads)} == dict(strategy.participations.uploads)
    assert [row["round"] for row in run.metrics()] == [1, 2, 3, 4, 5]


def test_a_failed_run_leaves_a_guarantee_for_requests_and_says_so(tmp_path):
    secure = {"seeded_noise": False, "plan": plan(sampling=FixedSizeSampling(CLIENTS, 3))}
    with pytest.raises(Died):
        play(tmp_path, dies_in=3, **secure)
    run = RunDirectory.open(tmp_path / "run")
    assert run.status == "failed"
    failed = {(g.basis, g.view): g.epsilon for g in run.guarantees()}
    complete, _ = play(tmp_path / "three", rounds=3, **secure)
    assert failed.keys() == {(g.basis, g.view) for g in complete.guarantees()} != set()
    released = next(g for g in complete.guarantees() if g.basis == "provable")
    assert failed["provable", released.view] == pytest.approx(released.epsilon)
    write_report(run)
    assert "This run failed: the guarantee covers" in (run.path / "report.md").read_text(
        encoding="utf-8"
    )


def test_without_its_memory_a_run_that_needs_it_does_not_go_on(tmp_path):
    with pytest.raises(Died):
        play(tmp_path, dies_in=4, memory=False)
    with pytest.raises(FederationNotReady, match="no longer have the memory that DP2FedSAM needs"):
        play(tmp_path, memory=False)


def test_a_run_that_needs_no_memory_resumes_without_it(tmp_path):
    options = {"method": DPFedAvg, "memory": False, "local": SGD}
    whole, _ = play(tmp_path / "whole", **options)
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=4, **options)
    parts, _ = play(tmp_path / "parts", **options)
    assert_same(parts, whole)


@pytest.mark.parametrize(
    "harm", grid(["torn", "altered", "emptied"], lambda harm: harm != "emptied")
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(whole, tmp_path, harm, caplog):
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=4)
    _harm(tmp_path / "parts/run/checkpoints/3.checkpoint", harm)
    parts, _ = play(tmp_path / "parts")
    assert "3.checkpoint: torn or altered" in caplog.text
    assert_same(parts, whole)


def test_with_no_sound_checkpoint_nothing_begins_anew_by_itself(tmp_path):
    with pytest.raises(Died):
        play(tmp_path, dies_in=4)
    for file in (tmp_path / "run/checkpoints").glob("*.checkpoint"):
        _harm(file, "altered")
    with pytest.raises(Damaged, match="begin a new run"):
        play(tmp_path)


def _harm(file: Path, harm: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    torn = {"torn": content[:-7], "altered": content, "emptied": b""}
    file.write_bytes(bytes(torn[harm]))


@pytest.mark.parametrize("restored", [None, 2], ids=["lost", "of an earlier backup"])
def test_a_run_whose_checkpoints_count_too_few_rounds_does_not_go_on(tmp_path, restored):
    """Otherwise its guarantee would omit the rounds that clients have uploaded in already."""
    checkpoints, backup = tmp_path / "run" / "checkpoints", tmp_path / "backup"
    if restored:
        play(tmp_path, rounds=restored, seeded_noise=False)
        shutil.copytree(checkpoints, backup)
    run, _ = play(tmp_path, rounds=4, seeded_noise=False)
    guarantees = run.guarantees()
    shutil.rmtree(checkpoints)
    if restored:
        shutil.copytree(backup, checkpoints)
    with pytest.raises(Damaged, match=f"counts {restored or 0} training rounds, and .* has 4"):
        play(tmp_path, rounds=5, seeded_noise=False)
    assert run.guarantees() == guarantees
    assert len(run.metrics()) == 4


def test_checkpoints_are_two_and_private(tmp_path):
    run, _ = play(tmp_path, seeded_noise=False)
    folder = run.path / "checkpoints"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {f.name for f in folder.iterdir()} == {"4.checkpoint", "5.checkpoint", "begun.jsonl"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}


def test_other_settings_are_refused_by_name(tmp_path):
    play(tmp_path, rounds=1)
    with pytest.raises(ValueError, match=r"seeded=False \(it began with True\)"):
        play(tmp_path, rounds=2, seeded_noise=False)


@pytest.mark.parametrize("dies_in", [1, None], ids=["no checkpoint", "checkpoint"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": FedRep}, r"method='FedRep' \(it began with 'FedPer'\)"),
        ({"local": LocalTraining(epochs=7)}, r"training-local=.*epochs=7"),
        ({"plan": plan(noise_multiplier=9.0)}, r"noise-multiplier=9\.0 \(it began with 1\.0\)"),
        ({"seed": 8}, r"seed=8 \(it began with 1\)"),
    ],
    ids=["method", "its option", "plan", "seed"],
)
def test_a_directory_that_is_resumed_by_hand_refuses_other_terms(tmp_path, changes, named, dies_in):
    def start(directory, *, method=FedPer, rounds=1, dies_in=None, **options):
        facts = {"plan": plan(), "seed": 1, "seeded_noise": True, **options}
        strategy = strategy_of(method, directory=directory, **facts)
        grid = DyingGrid(method.client_app(task(), allow_seeded_noise=True), CLIENTS)
        grid.dies_in = dies_in
        with closing(directory):
            strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=rounds)

    with suppress(Died):
        start(RunWriter.create(tmp_path / "run", {}), dies_in=dies_in)
    with pytest.raises(UnfitSetting, match=f"cannot continue with different settings: .*{named}"):
        start(RunWriter.resume(tmp_path / "run"), rounds=2, **changes)


def test_another_model_is_refused(tmp_path):
    play(
        tmp_path,
        rounds=1,
        method=FedDyn,
        plan=NonPrivatePlan(sampling=FullParticipation(CLIENTS)),
        ledger=False,
    )
    with pytest.raises(ValueError, match="differs from the run's first model"):
        play(tmp_path, rounds=2, ledger=False)


def test_two_runs_do_not_share_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "lock", partial(lock, seconds=0.1))
    config = {"run-directory": str(tmp_path / "run"), "resume": True}
    with (
        recorded_run(config, "one"),
        pytest.raises(InUse, match="in use by process"),
        recorded_run(config, "two"),
    ):
        raise AssertionError
    with recorded_run(config, "three") as run:
        assert run.resumed


def test_resuming_needs_a_directory():
    with (
        pytest.raises(ValueError, match="expected the run's path as run-directory"),
        recorded_run({"resume": True, "run-directory": ""}, "toy"),
    ):
        raise AssertionError


def test_a_metrics_line_that_was_torn_is_written_again(whole, tmp_path):
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=4)
    with (tmp_path / "parts/run/metrics.jsonl").open("a") as stream:
        stream.write('{"round": 4, "tor')
    parts, _ = play(tmp_path / "parts")
    assert_same(parts, whole)


def test_where_nobody_can_go_on_the_guarantee_counts_what_was_asked_for(tmp_path):
    # All clients, because a drawn cohort may be empty, and then nobody dies in that round.
    options = {"plan": plan(sampling=FullParticipation(CLIENTS)), "seeded_noise": False}
    with pytest.raises(Died):
        play(tmp_path, dies_in=4, **options)
    run = RunDirectory.open(tmp_path / "run")
    of_four = [g.epsilon for g in run.guarantees()]
    # As if the process had been killed before it wrote them.
    RunWriter.open(run.path).save_guarantees([])
    facts = {**run.metadata, "status": "running"}
    (run.path / "run.json").write_text(json.dumps({**facts, "accounted": False}))
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(FederationNotReady, match="no longer have the memory"):
        play(tmp_path, **options)
    assert [g.epsilon for g in run.guarantees()] == of_four
    assert run.metadata["accounted"]


@pytest.mark.parametrize("kept", [0, 3])
def test_a_ledger_that_lacks_releases_ends_a_run_that_would_go_on(tmp_path, kept):
    run, _ = play(tmp_path, rounds=3)
    lines = run.ledger_path.read_bytes().splitlines(keepends=True)
    run.ledger_path.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(LedgerCorrupt, match=r"holds \d releases of a run that made 3"):
        play(tmp_path)
    write_report(run)
    assert "The ledger lacks" in (run.path / "report.md").read_text(encoding="utf-8")


FIXED = FixedSizeSampling(population=CLIENTS, size=2)
PLANS = {
    "release": plan(),
    "output": PerturbationPlan(
        sampling=FIXED,
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=2.0),
        delta=0.01,
    ),
    "record": RecordLevelPlan.for_target(
        epsilon=2.0,
        delta=0.01,
        sampling=FullParticipation(CLIENTS),
        num_examples=30,
        rounds=4,
        clipping_norm=1.0,
        basis="provable",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_budget_ends_a_run_before_exceeding_it_also_after_resuming(tmp_path, name):
    options = {"method": DPFedAvg, "plan": PLANS[name], "ledger": False, "local": SGD}
    free, _ = play(tmp_path / "free", rounds=3, **{**options, "evaluate_every": 1})
    spent = [row["epsilon_provable"] for row in free.metrics()]
    assert spent == sorted(spent)
    limit = (spent[1] + spent[2]) / 2 if spent[2] > spent[1] else spent[0]
    stops_after = sum(epsilon <= limit for epsilon in spent)
    ending = {**options, "evaluate_every": 1}
    run, stopped = _with_budget(tmp_path / "paid", limit, rounds=5, **ending)
    assert run.status == "budget-exhausted"
    assert "above the budget" in run.metadata["reason"]
    assert len(run.metrics()) == stops_after
    assert max(row["epsilon_provable"] for row in run.metrics()) <= limit
    again, stopped = _with_budget(tmp_path / "paid", limit, rounds=5, **ending)
    assert again.status == "budget-exhausted"
    assert len(again.metrics()) == stops_after
    assert stopped.stopped is not None


def test_a_round_that_turns_out_to_be_the_last_is_evaluated_once(tmp_path):
    options = {"ledger": False, "method": DPFedAvg, "evaluate_every": 2, "rounds": 5}
    free, _ = play(tmp_path / "free", **{**options, "evaluate_every": 1})
    spent = [row["epsilon_provable"] for row in free.metrics()]
    run, _ = _with_budget(tmp_path / "paid", (spent[2] + spent[3]) / 2, **options)
    assert [row["round"] for row in run.metrics()] == [1, 2, 3]
    last = run.metrics()[-1]
    assert last["accuracy_mean"] == free.metrics()[2]["accuracy_mean"]
    assert last["epsilon_provable"] == spent[2]
    assert run.client_metrics()
    again, _ = _with_budget(tmp_path / "paid", (spent[2] + spent[3]) / 2, **options)
    assert len(again.metrics_path.read_text().splitlines()) == 4
    assert again.client_metrics() == run.client_metrics()


def _with_budget(folder, epsilon, **options):
    return play(folder, run_budget=Budget(epsilon=epsilon, delta=0.01), **options)


def test_a_calibrated_plan_makes_all_its_rounds_within_its_budget(tmp_path):
    options = {"method": DPFedAvg, "plan": PLANS["record"], "ledger": False, "local": SGD}
    run, one = _with_budget(tmp_path, 2.0, rounds=6, **options)
    assert len(run.metrics()) == 4
    assert "round 5" in one.stopped


def test_a_ledger_ends_a_resumed_seeded_run_like_the_whole_one(tmp_path):
    options = {"rounds": 9, "seeded_noise": True, "budget": Budget(epsilon=6.0, delta=0.01)}
    whole, _ = play(tmp_path / "whole", **options)
    done = len(whole.metrics())
    assert 2 <= done < 9
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=2, **options)
    parts, _ = play(tmp_path / "parts", **options)
    assert_same(parts, whole)
    assert parts.status == "budget-exhausted"


def test_a_budget_at_another_delta_or_without_privacy_is_refused():
    with pytest.raises(ValueError, match=r"budget\.delta=0\.1: expected the δ of the plan, 0\.01"):
        FederatedStrategy(DPFedAvg(), plan(), budget=Budget(epsilon=1.0, delta=0.1))
    with pytest.raises(ValueError, match="promises no privacy"):
        FederatedStrategy(
            DPFedAvg(),
            NonPrivatePlan(sampling=FullParticipation(CLIENTS)),
            budget=Budget(epsilon=1.0, delta=0.1),
        )


def _play_on_a_full_disk(folder, size, failure):
    """Play in a forked process whose files, after a round, may have ``size`` bytes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # pytest keeps them in files
        os.dup2(nowhere, stream)
    play(folder, rounds=1, seeded_noise=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        play(folder, rounds=40, seeded_noise=False)
    except Exception:
        failure.send(traceback.format_exc())


@pytest.mark.parametrize("size", grid([1500, 4000], lambda size: size == 1500))
def test_a_full_disk_ends_the_run_before_any_client_is_asked(tmp_path, size):
    context = multiprocessing.get_context("fork")
    failure, of_child = context.Pipe(duplex=False)
    process = context.Process(target=_play_on_a_full_disk, args=(tmp_path, size, of_child))
    process.start()
    of_child.close()
    assert "File too large" in failure.recv()
    process.join()
    run = RunDirectory.open(tmp_path / "run")
    reserved = [entry["kind"] for entry in run.ledger()].count("reserve")
    lines = (run.path / "checkpoints/begun.jsonl").read_text().splitlines()
    reserved_rounds = sum('"units"' in line for line in lines)
    assert reserved_rounds <= reserved < 40
    assert RunDirectory.open(tmp_path / "run").status in ("failed", "running")
