"""Callbacks receive the run directory's numbers, and cannot change the run."""

import logging

from flower_ext.privacy import FullParticipation, NonPrivatePlan, ReleasePlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.callbacks import Callback
from tests.support.recorded_runs import CLIENTS, play


class Notes(Callback):
    def __init__(self) -> None:
        self.said: list[tuple] = []

    def begin(self, run):
        self.said.append(("begin", run.resumed, run.config["method"]))

    def round(self, run, server_round, row):
        self.said.append(("round", server_round, row, run.metrics()[-1]))

    def end(self, run):
        self.said.append(("end", run.status, len(run.guarantees())))


class Broken(Callback):
    def begin(self, run):
        raise RuntimeError("no network")

    round = end = lambda self, *arguments: 1 / 0


def test_a_callback_hears_of_the_begin_each_round_and_the_end(tmp_path):
    notes = Notes()
    run, strategy, _ = play(tmp_path / "run", rounds=3, callbacks=[notes])
    begin, *rounds, end = notes.said
    assert begin == ("begin", False, "DPFedAvg")
    assert [number for _, number, *_ in rounds] == [1, 2, 3]
    assert end == ("end", "completed", len(strategy.guarantees()))
    for (_, number, row, written), kept in zip(rounds, run.metrics(), strict=True):
        assert written == kept == {"round": number, **row}  # no more than the file has by then


def test_a_callback_hears_of_a_failure(tmp_path):
    notes = Notes()
    play(tmp_path / "run", rounds=3, dies_in=2, callbacks=[notes])
    assert [what for what, *_ in notes.said] == ["begin", "round", "end"]
    assert notes.said[-1][1] == "failed"


def test_a_callback_that_raises_is_logged_once_and_changes_nothing(tmp_path, caplog):
    notes, facts = Notes(), {"seed": 1, "seeded_noise": True}
    with caplog.at_level(logging.INFO, logger="flwr"):
        one, *_ = play(tmp_path / "one", rounds=3, callbacks=[Broken(), notes], **facts)
    other, *_ = play(tmp_path / "other", rounds=3, **facts)
    lines = [
        each.getMessage() for each in caplog.records if each.getMessage().startswith("callback")
    ]
    assert lines == [
        "callback Broken failed; the run continues, and later errors of this callback are not "
        "logged: RuntimeError: no network"
    ]
    assert len(notes.said) == 5
    model = "model.safetensors"
    assert (one.path / model).read_bytes() == (other.path / model).read_bytes()


def test_a_callback_cannot_change_the_row_that_is_kept(tmp_path):
    class Greedy(Callback):
        def round(self, run, server_round, row):
            row.clear()

    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    run, *_ = play(tmp_path / "run", rounds=2, callbacks=[Greedy(), notes := Notes()], plan=plan)
    assert all("accuracy_mean" in row for row in RunDirectory.open(run.path).metrics())
    assert all("accuracy_mean" in row for what, _, row, *_ in notes.said[1:-1])


def test_nothing_but_aggregates_is_in_a_row(tmp_path):
    """A row has single numbers; only ``clients.csv`` has scores of single clients."""
    notes = Notes()
    plan = ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=0.5,
        noise_multiplier=1.0,
        rounds=2,
        delta=0.01,
    )
    play(tmp_path / "run", rounds=2, callbacks=[notes], plan=plan)
    for _, _, row, _ in notes.said[1:-1]:
        assert all(isinstance(value, int | float) for value in row.values())
