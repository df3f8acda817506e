"""Evaluations whose scores leave the clients in noised secure sums alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, Upcycled
from flower_ext.data import Examples
from flower_ext.federation.client import evaluating
from flower_ext.federation.messages import records
from flower_ext.federation.server.run_guarantees import not_covered, spent_by
from flower_ext.federation.sums.masked import MASKED_SUM
from flower_ext.privacy import Budget, Ledger, SecureScores, SecureSum, privacy_loss_of
from flower_ext.runs import RunWriter
from tests.support.grids import grid as grid_of
from tests.support.losing import Losing
from tests.support.secure_runs import CLIENTS, plan, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import initial, task

BOUNDS = (("accuracy", 0.0, 1.0), ("loss", 0.0, 3.0))
FINE = SecureScores(noise_multiplier=0.002, times=3, bounds=BOUNDS)


def scored(scores=FINE, method=DPFedAvg, **changes):
    changes.setdefault("plan", plan(queries=(scores,)))
    return strategy_of(method, evaluate_every=1, **changes)


def run(strategy, grid=Recorder, rounds=1, tasks=None, **facts):
    base = strategy.base if isinstance(strategy, Upcycled) else strategy
    app = base.method.client_app(tasks or task(), allow_seeded_noise=True)
    run_grid = grid(app, num_clients=CLIENTS)
    for name, value in facts.items():
        setattr(run_grid, name, frozenset(value))
    return run_grid, strategy.start(run_grid, initial(), num_rounds=rounds)


def evaluated(grid):
    return [m for m in grid.received if m.metadata.message_type.startswith("evaluate")]


@pytest.mark.parametrize(
    "method", grid_of([DPFedAvg, DP2FedSAM], lambda method: method is DP2FedSAM)
)
def test_the_means_equal_plain_scores_up_to_noise_of_the_stated_size(method):
    noised, plain = scored(method=method), scored(method=method, plan=plan())
    (_, ours), (_, theirs) = run(noised, rounds=2), run(plain, rounds=2)
    assert noised.refusals == []
    for number in (1, 2):
        one = ours.evaluate_metrics_clientapp[number]
        other = theirs.evaluate_metrics_clientapp[number]
        assert one["scored_clients"] == pytest.approx(CLIENTS, abs=0.05)
        for name in ("accuracy", "loss"):
            error = one[f"{name}_mean_error"]
            assert 0 < error < 0.01
            assert one[f"{name}_mean"] == pytest.approx(other[f"{name}_mean"], abs=6 * error)
            assert f"{name}_worst_decile" not in one
    assert noised.run.client_metrics == {}  # nobody's own scores are known


def test_nothing_but_a_masked_vector_leaves_a_client_that_evaluates():
    grid, _ = run(scored(seeded_noise=False))
    contents = [reply.content for reply in evaluated(grid)]
    assert len(contents) == CLIENTS
    assert {tuple(content.keys()) for content in contents} == {(records.UPDATE,)}
    assert not any(isinstance(r, MetricRecord) for c in contents for r in c.values())
    assert len({c[records.UPDATE]["message"].numpy().tobytes() for c in contents}) == CLIENTS


def test_scores_are_not_on_the_list_of_what_no_guarantee_covers():
    one, other = scored(), scored(plan=plan())
    for strategy in (one, other):
        run(strategy)
    assert not any("scores" in text for text in not_covered(one.run))
    assert any("scores and test-set sizes" in text for text in not_covered(other.run))
    bases = {
        guarantee.basis: any("training rounds only" in text for text in guarantee.not_covered)
        for guarantee in one.guarantees()
    }
    assert bases == {"published": True, "provable": False}
    with pytest.raises(ValueError, match="training_loss=True with SecureScores"):
        scored(training_loss=True)


def test_epsilon_covers_rounds_and_evaluations_and_is_in_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = scored(ledger=ledger, seeded_noise=False)
    run(strategy, rounds=3)
    mechanism = strategy.run.mechanism
    releases = {mechanism.release: 3, mechanism.query_sums[0].release: 3}
    expected = privacy_loss_of(releases, delta=mechanism.delta).epsilon
    assert spent_by(strategy.run)["epsilon_provable"] == pytest.approx(expected)
    assert ledger.releases == 6
    assert ledger.spent(mechanism.delta).epsilon == pytest.approx(expected)
    kinds = [entry["kind"] for entry in Ledger.read(tmp_path / "ledger.jsonl")]
    assert kinds == ["reserve", "commit"] * 6


class Watching(Recorder):
    """Notes how many releases the ledger holds whenever messages leave."""

    path = None
    seen = ()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        kinds = {m.metadata.message_type.partition(".")[0] for m in messages}
        held = sum(e["kind"] == "reserve" for e in Ledger.read(self.path))
        self.seen = [*self.seen, (sorted(kinds), held)]
        return super().send_and_receive(messages, timeout=timeout)


def test_an_evaluation_is_on_the_ledger_before_anybody_is_asked(tmp_path):
    path = tmp_path / "ledger.jsonl"
    strategy = scored(ledger=Ledger(path), seeded_noise=False)
    grid = Watching(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    grid.path = path
    strategy.start(grid, initial(), num_rounds=1)
    ledgers = [held for kinds, held in grid.seen if kinds == ["evaluate"]]
    assert ledgers == [2]


def test_no_evaluation_is_made_that_the_budget_does_not_allow(logged, tmp_path):
    query_plan = plan(queries=(FINE,))
    rounds_alone = privacy_loss_of(
        {query_plan.mechanism().release: 3}, delta=query_plan.delta
    ).epsilon
    for how in ("ledger", "budget"):
        limit = Budget(epsilon=rounds_alone * 1.01, delta=query_plan.delta)
        given = (
            {"ledger": Ledger(tmp_path / "ledger.jsonl", budget=limit)}
            if how == "ledger"
            else {"budget": limit}
        )
        strategy = scored(**given, seeded_noise=False)
        grid, _ = run(strategy, rounds=3)
        assert evaluated(grid) == []
        assert strategy.participations.rounds == 3
        assert strategy.participations.answers["scores"] == 0
        assert "no scores after round 1" in logged.text
        logged.clear()


def test_an_account_of_a_population_counts_evaluations_too(tmp_path):
    path, query_plan = tmp_path / "account.jsonl", plan(queries=(FINE,))
    budget = Budget(epsilon=1e9, delta=query_plan.delta, ledger=path)
    run(scored(budget=budget, seeded_noise=False), rounds=2)
    charges = [
        one for one in map(json.loads, path.read_text().splitlines()) if one["kind"] == "charge"
    ]
    assert len(charges) == 4
    multipliers = [one["release"]["noise_multiplier"] for one in charges]
    assert multipliers == [1.0, 0.002, 1.0, 0.002]


@pytest.mark.parametrize("stage", ["begin", "keys", "question"])
def test_too_few_participants_give_no_scores_and_still_spend(stage, logged):
    class AtEvaluation(Losing):
        """Loses clients in the stage of an evaluation, not of the training before it."""

        trained = False

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            self.lost = self.later if self.trained else frozenset()
            out = super().send_and_receive(messages, timeout=timeout)
            self.trained |= any(
                "question" in m.content[MASKED_SUM] for m in messages if MASKED_SUM in m.content
            )
            return out

    strategy = scored()
    _, result = run(strategy, AtEvaluation, later=[(p, stage) for p in range(4)])
    assert 1 not in result.evaluate_metrics_clientapp
    assert "no scores after round 1" in logged.text
    assert strategy.participations.answers["scores"] == 1


def test_scores_that_a_client_spoiled_are_discarded(logged):
    class Spoiling(Recorder):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                evaluates = reply.metadata.message_type.startswith("evaluate")
                if evaluates and reply.metadata.src_node_id == 1_003:
                    data = records.to_arrays(reply.content[records.UPDATE])["message"].tobytes()
                    far_off = data[:-1] + bytes([(data[-1] + 64) % 256])  # by a quarter of the ring
                    sent = {"message": records.to_bytes_array(far_off)}
                    reply.content[records.UPDATE] = records.to_record(sent)
            return replies

    strategy = scored()
    _, result = run(strategy, Spoiling)
    assert 1 not in result.evaluate_metrics_clientapp
    assert "no scores after round 1: the noised sum has a norm of" in logged.text
    assert strategy.participations.answers["scores"] == 1


def test_clients_lost_while_they_evaluate_leave_the_mean_of_the_others():
    class Silent(Recorder):
        def send_and_receive(self, messages, *, timeout=None):
            kept = [
                m
                for m in messages
                if not m.metadata.message_type.startswith("evaluate")
                or m.metadata.dst_node_id - 1_000 not in (0, 3)
            ]
            return super().send_and_receive(kept, timeout=timeout)

    strategy = scored()
    _, result = run(strategy, Silent)
    assert result.evaluate_metrics_clientapp[1]["scored_clients"] == pytest.approx(6, abs=0.05)


def with_test(change):
    """The task whose client 2 has its test examples changed."""
    loop_task = task()
    real = loop_task.data

    def data(number):
        found = real(number)
        return replace(found, test=change(found.test)) if number == 2 else found

    return replace(loop_task, data=data)


def test_a_client_without_test_examples_is_not_counted_and_not_seen():
    strategy = scored()
    grid, result = run(
        strategy, tasks=with_test(lambda data: Examples(data.features[:0], data.targets[:0]))
    )
    assert result.evaluate_metrics_clientapp[1]["scored_clients"] == pytest.approx(7, abs=0.05)
    sizes = {len(m.content[records.UPDATE]["message"].numpy()) for m in evaluated(grid)}
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "score",
    grid_of(
        [100.0, -100.0, float("nan"), float("inf")],
        lambda score: score not in (-100, float("inf")),
    ),
)
def test_no_clients_metric_moves_the_sum_by_more_than_its_bound(score):
    real = task()
    metrics = {"accuracy": lambda outputs, targets: torch.tensor(score)}
    strategy, plain = scored(), scored()
    _, one = run(strategy, tasks=replace(real, metrics=metrics))  # all clients are odd
    _, other = run(plain)
    row = one.evaluate_metrics_clientapp[1]
    assert row["scored_clients"] == pytest.approx(CLIENTS, abs=0.05)
    assert -0.01 <= row["accuracy_mean"] <= 1.01
    expected = other.evaluate_metrics_clientapp[1]["loss_mean"]
    assert row["loss_mean"] == pytest.approx(expected, abs=0.05)


def test_an_evaluation_that_fails_on_a_clients_data_sends_an_empty_part(monkeypatch, logged):
    def broken(task, params, examples):
        raise ZeroDivisionError("of a record")

    monkeypatch.setattr(evaluating, "evaluate", broken)
    strategy = scored()
    grid, result = run(strategy)
    assert strategy.refusals == []
    assert len(evaluated(grid)) == CLIENTS
    assert not any(m.has_error() for m in evaluated(grid))
    assert 1 not in result.evaluate_metrics_clientapp  # the noised count is below 1
    # As for trainings, only a traceback may hold a record, in the client's own log.
    assert not any("of a record" in record.getMessage() for record in logged.records)


def test_an_unfinished_evaluation_counts_when_the_run_resumes(tmp_path):
    run_ = RunWriter.create(tmp_path / "run", {})
    strategy = scored(directory=run_, ledger=run_.open_ledger(), seeded_noise=False)

    class Dying(Recorder):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if self.asked(messages) == 2:
                raise KeyboardInterrupt
            return super().send_and_receive(messages, timeout=timeout)

        count = 0

        def asked(self, messages):
            self.count += any(m.metadata.message_type.startswith("evaluate") for m in messages)
            return self.count

    with pytest.raises(KeyboardInterrupt):
        run(strategy, Dying, rounds=3)
    assert strategy.participations.answers["scores"] == 2
    run_.close()
    again = RunWriter.resume(tmp_path / "run")
    second = scored(directory=again, ledger=again.open_ledger(), seeded_noise=False)
    run(second, rounds=3)
    # The second of two rounds is done again.
    assert second.participations.answers["scores"] == 1 + 1 + 2
    assert second.run.spending.ledger.releases >= second.participations.rounds + 4
    expected = privacy_loss_of(
        second.run.mechanism.releases(second.participations), delta=second.run.plan.delta
    ).epsilon
    assert spent_by(second.run)["epsilon_provable"] == pytest.approx(expected)


def test_upcycled_runs_evaluate_by_secure_sums_too():
    strategy = Upcycled(scored(), coefficient=0.5)
    _, result = run(strategy, rounds=4)
    assert len(result.evaluate_metrics_clientapp) == 4
    assert strategy.base.participations.answers["scores"] == 4


def test_seeded_noise_of_two_evaluations_differs():
    """In silent rounds no training lies between them."""
    still = SecureScores(noise_multiplier=0.5, times=4, bounds=BOUNDS)
    strategy = Upcycled(scored(still), coefficient=0.5)
    _, result = run(strategy, rounds=4)
    counts = [m["scored_clients"] for m in result.evaluate_metrics_clientapp.values()]
    assert len({*counts}) == len(counts)


def test_the_same_seed_gives_the_same_means():
    one, two = (run(scored())[1].evaluate_metrics_clientapp[1] for _ in range(2))
    assert dict(one) == dict(two)
    sums = SecureSum(colluding=0.0, dropouts=0.5, resist_equivocation=False)
    other = run(scored(plan=plan(queries=(FINE,), noise_placement=sums)))[1]
    assert np.isfinite(other.evaluate_metrics_clientapp[1]["accuracy_mean"])
