"""Queries beside the training: a vector of each client, released as one noised sum."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from flower_ext.algorithms import DPFedAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation.client.hidden_errors import hidden_errors
from flower_ext.federation.server.query_round import standard_errors
from flower_ext.federation.server.run_guarantees import spent_by
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    Ledger,
    PrivacyUnit,
    SecureScores,
    VectorQuery,
    privacy_loss_of,
)
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.privacy.withdrawal import withdraw
from flower_ext.runs import RunWriter
from tests.support.secure_runs import CLIENTS, plan, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import CLASSES, client_data, initial, task


@dataclass(frozen=True, kw_only=True)
class LabelHistogram(VectorQuery):
    """The labels of all clients' training examples; each client counts as one."""

    name = "labels"
    num_labels: int = CLASSES
    norm = 1.0

    @property
    def size(self):
        return self.num_labels

    def vector(self, client):
        counts = np.bincount(client.data.train.targets, minlength=self.num_labels)
        return counts / max(1, counts.sum())

    def answer(self, total, stddev):
        labels = {f"label_{label}": float(clients) for label, clients in enumerate(total)}
        return {**labels, "label_error": stddev}


FINE = LabelHistogram(noise_multiplier=0.002)
DELTA = plan().delta


def asking(query=FINE, **changes):
    return strategy_of(DPFedAvg, plan=plan(queries=(query, *changes.pop("besides", ()))), **changes)


def run(strategy, kinds=(LabelHistogram,), rounds=1, tasks=None):
    app = strategy.method.client_app(tasks or task(), allow_seeded_noise=True, queries=kinds)
    grid = Recorder(app, num_clients=CLIENTS)
    return grid, strategy.start(grid, initial(), num_rounds=rounds)


def exact():
    targets = [client_data(client).train.targets.numpy() for client in range(CLIENTS)]
    return np.sum([np.bincount(t, minlength=CLASSES) / len(t) for t in targets], axis=0)


def released(strategy):
    answer = strategy.answers["labels"]
    return np.array([answer[f"label_{label}"] for label in range(CLASSES)])


def test_an_answer_sums_the_clients_vectors_with_noise_of_the_stated_size():
    strategy = asking()
    run(strategy, rounds=2)
    assert strategy.refusals == []
    error = strategy.answers["labels"]["label_error"]
    assert 0.002 < error < 0.003  # members may be lost, so each adds a little more
    np.testing.assert_allclose(released(strategy), exact(), atol=6 * error)
    assert strategy.participations.answers == {"labels": 1}  # asked before round 1 alone


def test_the_answer_is_among_the_metrics_of_the_first_round(tmp_path):
    directory = RunWriter.create(tmp_path / "run", {})
    strategy = asking(directory=directory)
    run(strategy, rounds=2)
    first, second = directory.metrics()
    assert first["label_0"] == strategy.answers["labels"]["label_0"]
    assert "label_0" not in second
    assert first["query_messages"] >= 2 * CLIENTS
    assert "evaluation_messages" not in first


def test_queries_rounds_and_evaluations_are_counted_in_one_epsilon_and_one_ledger(tmp_path):
    scores = SecureScores(noise_multiplier=3.0, times=2)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    coarse = replace(FINE, noise_multiplier=2.0)
    options = {"besides": (scores,), "evaluate_every": 1, "seeded_noise": False}
    strategy = asking(coarse, ledger=ledger, **options)
    run(strategy, rounds=2)
    mechanism = strategy.run.mechanism
    of_coarse, of_scores = mechanism.query_sums
    releases = {mechanism.release: 2, of_coarse.release: 1, of_scores.release: 2}
    expected = privacy_loss_of(releases, delta=mechanism.delta).epsilon
    assert spent_by(strategy.run)["epsilon_provable"] == pytest.approx(expected)
    assert ledger.spent(mechanism.delta).epsilon == pytest.approx(expected)
    models = next(g for g in strategy.guarantees() if g.basis == "provable")
    assert "1 sum of labels, 2 sums of scores" in models.source


def test_metrics_have_the_error_that_noise_gives_each_number(tmp_path):
    directory = RunWriter.create(tmp_path / "run", {})
    strategy = asking(directory=directory)
    run(strategy)
    (row,) = directory.metrics()
    answer = strategy.answers["labels"]
    for label in range(CLASSES):
        assert row[f"label_{label}_error"] == pytest.approx(answer["label_error"], rel=0.25)
    assert [*answer] == [*(f"label_{label}" for label in range(CLASSES)), "label_error"]
    assert [*directory.metrics().noised()] == [name for name in answer if name[-5:] != "error"]


@dataclass(frozen=True, kw_only=True)
class Largest(LabelHistogram):
    """The share of the most frequent label, which only some totals have."""

    fails: bool = False

    def answer(self, total, stddev):
        if total.sum() > 2 * CLIENTS:
            if self.fails:
                raise ArithmeticError
            return {"sum": total.sum()}
        return {"sum": total.sum(), "share": total.max() / total.sum()}


@pytest.mark.parametrize("fails", [False, True])
def test_a_number_that_noise_can_make_undefined_has_no_error(fails):
    query = Largest(noise_multiplier=1.0, fails=fails)
    total = np.full(CLASSES, CLIENTS / CLASSES)
    answer = query.answer(total, 0.0)
    errors = standard_errors(query, answer, total, stddev=float(CLIENTS))
    assert errors.keys() == (set() if fails else {"sum_error"})
    errors = standard_errors(query, answer, total, stddev=1e-3)
    assert errors["sum_error"] == pytest.approx(1e-3 * CLASSES**0.5, rel=0.2)
    assert 0 < errors["share_error"] < 1e-3
    with_errors = answer | {"sum_error": 2.0}  # the query's own
    assert standard_errors(query, with_errors, total, stddev=1e-3) == {}


@dataclass(frozen=True, kw_only=True)
class OddHistogram(LabelHistogram):
    """A histogram that goes wrong on the clients with label 3."""

    oddity: str = "none"

    def vector(self, client):
        vector = super().vector(client)
        if vector[3] == 0:
            return vector
        if self.oddity == "raises":
            raise RuntimeError("label 3")
        return {"nan": vector * np.nan, "long": np.ones(9), "huge": vector * 1e30}[self.oddity]


@pytest.mark.parametrize("oddity", ["raises", "nan", "long", "huge"])
def test_an_odd_clients_part_is_zero_or_bounded_and_moves_nobody_elses(oddity):
    query = OddHistogram(noise_multiplier=0.002, oddity=oddity)
    strategy = asking(query)
    run(strategy, kinds=[OddHistogram])
    assert strategy.refusals == []  # the server does not learn who is odd
    assert strategy.participations.rounds == 1
    expected = np.zeros(CLASSES)
    for client in range(CLIENTS):
        targets = client_data(client).train.targets.numpy()
        share = np.bincount(targets, minlength=CLASSES) / len(targets)
        if share[3]:
            share = share / np.linalg.norm(share) if oddity == "huge" else 0 * share
        expected += share
    error = strategy.answers["labels"]["label_error"]
    np.testing.assert_allclose(released(strategy), expected, atol=6 * error)
    assert l2_norm({"labels": released(strategy) - expected}) < 0.1


@dataclass(frozen=True, kw_only=True)
class WrongSize(LabelHistogram):
    """A query whose vectors have two elements too many, on clients with a low enough number."""

    failing: int = CLIENTS

    def vector(self, client):
        vector = super().vector(client)
        # The first feature tells clients apart; all tensors of a client are the same every time.
        lucky = [client_data(n).train.features[0, 0] for n in range(self.failing, CLIENTS)]
        return vector if client.data.train.features[0, 0] in lucky else np.append(vector, [0, 0])


@pytest.mark.parametrize("failing", [1, CLIENTS])
def test_a_client_says_why_a_query_failed_and_a_simulation_says_so(failing, logged):
    hidden_errors.clear()
    strategy = asking(WrongSize(noise_multiplier=0.002, failing=failing))
    run(strategy, kinds=(WrongSize,))
    warnings = [
        record for record in logged.records if "adds zeros to the sum" in record.getMessage()
    ]
    assert len(warnings) == failing
    assert "query labels failed (InvalidValue)" in warnings[0].getMessage()
    assert sum(record.exc_info is not None for record in warnings) == 1  # `log_once`
    assert (
        "has shape (6,), or holds NaN or infinite values: expected finite numbers of shape (4,)"
        in str(warnings[0].exc_info[1])
    )
    errors = [record.getMessage() for record in logged.records if record.levelname == "ERROR"]
    if failing < CLIENTS:
        assert errors == []
    else:
        assert len(errors) == 1
        assert f"{CLIENTS} clients hid {CLIENTS} errors" in errors[0]
        # The answer is noise alone, and its error covers this noise, not the missing vectors.
        error = strategy.answers["labels"]["label_error"]
        np.testing.assert_allclose(released(strategy), 0.0, atol=6 * error)


def test_a_query_without_a_training_round_leaves_its_guarantee(tmp_path):
    """The budget pays for the answer, and for no round."""
    query = LabelHistogram(noise_multiplier=3.0)
    directory = RunWriter.create(tmp_path / "run", {})
    alone = privacy_loss_of([asking(query).run.query_sums[0].release], delta=DELTA).epsilon
    budget = Budget(epsilon=1.001 * alone, delta=DELTA)
    strategy = asking(query, directory=directory, budget=budget)
    run(strategy, rounds=2)
    assert (strategy.participations.rounds, len(strategy.answers)) == (0, 1)
    guarantees = {one.view: one.epsilon for one in strategy.guarantees()}
    assert guarantees[AdversaryView.RELEASED_MODELS] == pytest.approx(alone)
    assert min(guarantees.values()) >= alone * (1 - 1e-9)
    assert directory.guarantees() == strategy.guarantees()


def test_a_run_of_no_rounds_says_that_it_asks_no_query(logged):
    strategy = asking()
    run(strategy, rounds=0)
    assert strategy.answers == {}
    assert "num_rounds=0: no query of the plan is asked" in logged.text


def test_a_query_asks_for_no_diagnostics_beside_its_masked_vector():
    grid, _ = run(asking(diagnostics=True))
    asked = [m.content["round"] for m in grid.sent if "query" in m.content]
    assert len(asked) == CLIENTS
    assert not any("diagnostics" in of_round for of_round in asked)


def test_a_query_that_too_few_can_answer_is_reported_once(tmp_path, logged):
    account = tmp_path / "study.jsonl"
    account.touch()
    withdraw(account, PrivacyUnit.CLIENT, range(CLIENTS - 1))
    strategy = asking(budget=Budget(epsilon=1e6, delta=DELTA, ledger=account))
    run(strategy)
    assert logged.text.count("no labels after round 1") == 1
    assert strategy.participations.answers == {"labels": 1}


def test_an_app_that_lacks_a_query_says_how_to_add_it():
    strategy = asking()
    run(strategy, kinds=())
    assert "labels" not in strategy.answers
    assert "client_app(queries=" in strategy.refusals[0]
    assert strategy.participations.rounds == 1


def test_a_resumed_run_does_not_ask_again(tmp_path):
    directory = RunWriter.create(tmp_path / "run", {})
    run(asking(directory=directory, seeded_noise=False), rounds=1)
    directory.close()
    again = asking(directory=RunWriter.resume(tmp_path / "run"), seeded_noise=False)
    run(again, rounds=2)
    assert again.participations.answers == {"labels": 1}
    assert again.participations.rounds == 2


class InEvaluations(LabelHistogram):
    """The same, asked in each evaluation."""

    schedule = "in evaluations"


def test_a_query_in_evaluations_takes_the_place_of_reported_scores():
    strategy = asking(InEvaluations(noise_multiplier=0.002, times=2), evaluate_every=1)
    grid, result = run(strategy, kinds=(InEvaluations,), rounds=2)
    assert strategy.participations.answers == {"labels": 2}
    np.testing.assert_allclose(released(strategy), exact(), atol=0.03)
    assert set(result.evaluate_metrics_clientapp) == {1, 2}
    assert strategy.run.client_metrics == {}
    assert not any("scores" in line for g in strategy.guarantees() for line in g.not_covered)
    replies = [m for m in grid.received if m.metadata.message_type.startswith("evaluate")]
    assert replies
    assert not any(m.content.metric_records for m in replies)


def test_two_queries_in_evaluations_are_refused():
    scores = SecureScores(noise_multiplier=1.0)
    with pytest.raises(
        InvalidValue, match="expected at most one query with schedule='in evaluations'"
    ):
        asking(InEvaluations(noise_multiplier=1.0), besides=(scores,))


def test_queries_that_no_sum_protects_are_refused():
    with pytest.raises(InvalidValue, match=r"queries=\['labels'\] with noise_placement='server'"):
        plan(noise_placement="server", queries=[FINE])
    with pytest.raises(InvalidValue, match="expected each kind of query at most once"):
        plan(queries=[FINE, FINE])
    with pytest.raises(InvalidValue, match="noise_multiplier=0"):
        LabelHistogram(noise_multiplier=0.0)


def test_a_kind_of_query_without_a_name_is_refused():
    class Nameless(LabelHistogram):
        name = None

    with pytest.raises(ValueError, match="Nameless has no name: set the class attribute name"):
        Nameless(noise_multiplier=1.0)
