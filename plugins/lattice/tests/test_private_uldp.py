"""Private weights over ring-LWE in runs: correct sums, lost messages and forged messages."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import UldpAvg, UldpSgd
from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted_silo import stored_silo
from flower_ext.privacy import (
    PoissonSampling,
)
from flower_ext_lattice import LatticeWeighting, columns
from flower_ext_lattice.messages import LatticeSum
from plugins.lattice.tests.private_runs import (
    EVERYONE,
    LATTICE,
    NORM,
    SOME,
    Watch,
    lattice_of,
)
from tests.support import grids
from tests.support.plans import mechanism_of
from tests.support.private_silos import (
    SMALL,
    difference,
    make,
    make_openly,
    start,
    vault,
)
from tests.support.silos import ROUNDS, SEED, SILOS, USERS, plan, task
from tests.support.travelling import Recorder


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
@pytest.mark.parametrize("method", grids.grid([UldpAvg, UldpSgd], lambda method: method is UldpAvg))
def test_every_coordinate_of_a_sum_is_that_of_plain_weights(method, sampling, monkeypatch):
    watch = Watch(monkeypatch)
    start(strategy := lattice_of(method, sampling=sampling))
    assert strategy.refusals == []
    assert len(watch.sums) == ROUNDS
    for number, total in enumerate(watch.sums, start=1):
        assert np.abs(total - watch.expected(number)).max() <= 1e-7 * NORM
    if sampling is SOME:
        assert any(len(places) < USERS for places in watch.drawn)
        assert strategy.run.progress.row["users"] == len(watch.drawn[-1])


def test_the_model_is_that_of_plain_weights_and_of_paillier():
    models = [start(make_openly(UldpAvg))[1]]
    models += [start(make(protocol=protocol))[1] for protocol in (SMALL, LATTICE)]
    assert difference(models[2], models[0]) <= 1e-6
    assert difference(models[2], models[1]) <= 1e-5
    assert difference(models[2], records.to_arrays(ArrayRecord(task().initial_params(SEED)))) > 1e-3


def test_by_name_a_protocol_has_its_default_settings():
    protocol = make(protocol="lattice").run.summation.protocol
    assert protocol == LatticeWeighting()
    mechanism = mechanism_of(plan(EVERYONE), silos=3)
    settings = protocol.settings_of(mechanism, silos=3, coordinates=5)
    assert settings.silo_record_limits == (2000, 2000, 2000)


@pytest.fixture(scope="module")
def transcript():
    strategy = lattice_of(sampling=SOME, evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    return strategy, grid


def arrays(messages):
    for message in messages:
        for record in message.content.array_records.values():
            for name, array in records.to_arrays(record).items():
                yield message, name, array


def test_the_server_receives_messages_of_the_protocol_and_nothing_else(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sizes = {"begin": {32}, "keys": {2 * 60, 0}, "count": {(4 + 32) * USERS, 4 * USERS}}
    sizes["sum"] = {LatticeSum.size(facts)}
    seen = {}
    for _, name, array in arrays(m for m in grid.received if "query.id" not in str(m.metadata)):
        if name == "one-by-one":
            assert array.shape == ()
            continue
        assert (array.dtype, array.ndim) == (np.uint8, 1)
        seen.setdefault(name, set()).add(array.size)
    assert seen == sizes


def test_no_secret_of_a_silo_is_in_any_message(transcript):
    _, grid = transcript
    sent_bytes = b"||".join(array.tobytes() for _, _, array in arrays([*grid.sent, *grid.received]))
    for number in range(SILOS):
        silo = stored_silo(vault(grid, number))
        for secret in (silo.seed, silo.private, *silo._pairs._keys.values()):
            assert len(secret) == 32
            assert secret not in sent_bytes
        assert vault(grid, number).load() not in sent_bytes


def test_weights_and_uploads_of_every_round_are_fresh(transcript):
    _, grid = transcript
    sent = {array.tobytes() for _, name, array in arrays(grid.sent) if name == "weights"}
    assert len(sent) == ROUNDS
    assert len({data[:12] for data in sent}) == ROUNDS  # epochs
    sums = [array[20:].tobytes() for _, name, array in arrays(grid.received) if name == "sum"]
    assert len(set(sums)) == SILOS * ROUNDS
    words = {data[at : at + 6] for data in sums for at in range(0, 240, 6)}
    assert len(words) == 40 * len(sums)


def test_while_nobody_is_drawn_one_epoch_lasts_for_the_run():
    grid, _ = start(lattice_of(evaluate_every=0), Recorder)
    weights = [array for _, name, array in arrays(grid.sent) if name == "weights"]
    assert len({array.tobytes() for array in weights}) == 1


HIDDEN = replace(LATTICE, draw_choices=5)


def hidden_lattice(**options):
    return lattice_of(protocol=HIDDEN, sampling=SOME, **options)


def test_sums_hold_the_users_that_all_silos_took_by_oblivious_transfer(monkeypatch):
    """Only a test, which acts for all parties at once, can know who was drawn."""
    watch, made, taken = Watch(monkeypatch), [], []
    of_server, of_silo = columns.draw_columns, columns.open_columns

    def server_makes(settings):
        made.append(of_server(settings).drawn)
        return dataclasses.replace(of_server(settings), drawn=made[-1])

    def silo_takes(*arguments):
        taken_by_silo = of_silo(*arguments)
        taken.append([column for column, _ in taken_by_silo])
        return taken_by_silo

    monkeypatch.setattr(columns, "draw_columns", server_makes)
    monkeypatch.setattr(columns, "open_columns", silo_takes)
    start(strategy := hidden_lattice())
    assert strategy.refusals == []
    assert len(taken) == ROUNDS * SILOS
    drawn = [
        [
            at
            for at, (is_drawn, column) in enumerate(zip(made[number], row, strict=True))
            if is_drawn[column]
        ]
        for number, row in enumerate(taken[::SILOS])
    ]
    watch.drawn[:] = drawn
    for number, taken_by_silo in enumerate(watch.sums, start=1):
        assert np.abs(taken_by_silo - watch.expected(number)).max() <= 1e-7 * NORM
    assert "users" not in strategy.run.progress.row
    assert taken == [row for row in taken[::SILOS] for _ in range(SILOS)]


def test_only_silo_0_draws_and_the_server_sees_group_elements():
    grid, _ = start(hidden_lattice(evaluate_every=0), Recorder)
    draws = [m for m, name, _ in arrays(grid.sent) if name == "draw"]
    assert [m.metadata.dst_node_id for m in draws] == [1_000] * ROUNDS
    answers = [a.tobytes() for _, name, a in arrays(grid.received) if name == "draw"]
    pieces = [data[at : at + 32] for data in answers for at in range(0, len(data), 32)]
    assert len(set(pieces)) == len(pieces) == ROUNDS * USERS


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: LatticeWeighting(draw_choices=1), "draw_choices=1: expected an integer >= 2"),
        (
            lambda: lattice_of(protocol=HIDDEN),
            "users are drawn at the rate 1; expected a multiple of 1/5",
        ),
        (
            lambda: lattice_of(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.5)),
            "draw_choices=5: users are drawn at the rate 0.5; expected a multiple",
        ),
    ],
)
def test_a_draw_that_does_not_fit_the_plan_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()
