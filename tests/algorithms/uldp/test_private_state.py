"""The state of private weighting across rounds, its settings and its guarantees."""

import json
import stat
from dataclasses import replace
from functools import partial

import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
    UldpSgd,
)
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    FederationNotReady,
    InProcessGrid,
    recorded,
)
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Ledger,
    PoissonSampling,
    gaussian_loss,
)
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.runs import RunWriter
from flower_ext.runs.settings import UnfitSetting
from flower_ext.secure.weighting import protocol as protocols
from flower_ext.secure.weighting.paillier_silo import PaillierOpenSum
from tests.support.imported_anew import run_anew
from tests.support.least_squares import Died
from tests.support.plans import mechanism_of
from tests.support.private_silos import (
    EVERY,
    SMALL,
    FreshProcesses,
    Meddler,
    Owned,
    difference,
    make,
    make_openly,
    start,
    vault,
)
from tests.support.private_uldp import HIDDEN
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    histogram,
    plan,
    silos,
    task,
)
from tests.support.strategies import private_strategy_of


@pytest.mark.parametrize("sampling", [FullParticipation(USERS), PoissonSampling(USERS, 0.4)])
def test_every_message_may_reach_a_fresh_process(sampling):
    _, model = start(strategy := make(sampling=sampling), FreshProcesses)
    assert strategy.refusals == []
    if isinstance(sampling, FullParticipation):
        _, expected = start(make_openly(UldpAvg))
        assert difference(model, expected) <= ROUNDS * SMALL.precision


def test_with_a_folder_for_secrets_a_silo_outlives_its_supernode(tmp_path):
    _, model = start(strategy := make(), Owned, folder=tmp_path)
    _, expected = start(make_openly(UldpAvg))
    assert strategy.refusals == []
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    for number in range(SILOS):
        (file,) = (tmp_path / str(1_000 + number)).rglob("*.secret")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_round_is_on_record_before_its_sum_leaves():
    grid, _ = start(make(), rounds=2)
    for number in range(SILOS):
        facts = json.loads(vault(grid, number).load())
        assert facts["last_round"] == 2


def test_a_failing_client_does_not_use_up_the_round_of_the_others(monkeypatch):
    finish = PaillierOpenSum.finish

    def full(self, noise):
        if self._silo.index == 1:
            raise OSError("no space left on device")
        return finish(self, noise)

    monkeypatch.setattr(PaillierOpenSum, "finish", full)
    start(strategy := make())
    assert len(strategy.refusals) == ROUNDS  # from silo 1 in every round, and from nobody else
    assert all("node 1001" in refusal for refusal in strategy.refusals)


def test_what_encoding_and_dither_add_to_the_sensitivity_is_paid_for(tmp_path):
    coarse = replace(SMALL, precision=0.05)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    start(strategy := make(protocol=coarse, ledger=ledger))
    bound = strategy.run.summation.server.settings.sensitivity
    assert strategy.run.mechanism.sensitivity == bound > 1.05
    assert strategy.run.plan.mechanism().sensitivity == 1.0  # the given plan is unchanged
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4 / bound, releases=ROUNDS, delta=1e-5).epsilon
    assert views[AdversaryView.SUM_ONLY] == pytest.approx(expected)
    assert views[AdversaryView.RELEASED_MODELS] == pytest.approx(expected)
    assert ledger.spent(1e-5).epsilon == pytest.approx(expected)


@EVERY
def test_a_resumed_run_has_new_keys_and_counts_all_rounds(protocol, tmp_path):
    privately = partial(make, protocol=protocol)

    def of(directory, rounds, make_run=privately):
        start(strategy := make_run(directory=directory), rounds=rounds)
        directory.close()
        assert strategy.refusals == []
        return strategy

    start(whole := privately(), rounds=3)
    of(RunWriter.create(tmp_path / "run", {}), 1)
    resumed = of(RunWriter.resume(tmp_path / "run"), 3)
    epsilons = [[one.epsilon for one in each.guarantees()] for each in (resumed, whole)]
    assert epsilons[0] == epsilons[1]
    with pytest.raises(InvalidValue, match="PlainSum' .it began with 'private weig"):
        of(RunWriter.resume(tmp_path / "run"), 4, make_openly)


def test_a_run_that_died_in_round_one_keeps_its_sum(tmp_path):
    """Without a checkpoint, its recorded settings alone tell the two runs apart."""
    for strategy, error, match in (
        (make(), Died, ""),
        (make_openly(), UnfitSetting, r"sum='PlainSum' \(it began with 'private weighting"),
    ):
        app = strategy.method.client_app(task(), allow_seeded_noise=True)
        grid = Meddler(app, num_clients=SILOS, meddle=die, groups=("1",))
        with pytest.raises(error, match=match or None):
            recorded(strategy, tmp_path / "run").start(grid, ArrayRecord(task().initial_params(0)))


def die(replies, grid):
    raise Died


def test_a_resumed_run_counts_the_larger_sensitivity_of_both_set_ups():
    def after(before, anew):
        earlier, strategy = make(), make()
        sums, earlier_sums = strategy.run.summation, earlier.run.summation
        earlier_sums.mechanism = replace(earlier_sums.mechanism, sensitivity=before)
        sums.mechanism = replace(sums.mechanism, sensitivity=anew)
        sums.restore(earlier_sums.state())
        return strategy.run.mechanism.sensitivity

    assert after(before=1.1, anew=1.2) == after(before=1.2, anew=1.1) == 1.2


def test_guarantees_say_what_the_protocol_shows_and_what_it_rests_on():
    start(strategy := make(sampling=PoissonSampling(USERS, 0.5)))
    sums = next(g for g in strategy.guarantees() if g.view is AdversaryView.SUM_ONLY)
    assert any("Paillier" in text for text in sums.assumptions)
    for guarantee in strategy.guarantees():
        if guarantee.basis == "provable":
            assert HONEST_COUNTS in guarantee.assumptions
    shown = " ".join(sums.not_covered)
    assert "how many users have no record" in shown
    assert "how many records each user has" not in shown


def test_a_user_with_too_many_records_ends_the_run_after_three_sums():
    held = histogram(silos(), USERS)
    most = int(held.max())
    assert most < held.sum(axis=0).max()
    with pytest.raises(FederationNotReady, match=f"max_records_per_user={most}"):
        start(strategy := make(protocol=replace(SMALL, max_records_per_user=most)))
    assert strategy.participations.rounds == ROUNDS


@pytest.mark.parametrize("users", [2, USERS])
@pytest.mark.parametrize("silos", [2, 100])
def test_steps_of_the_encoding_are_at_most_a_quarter_of_silo_noise(users, silos):
    """Larger steps would round the noise of every silo to zero, and leave the sum without noise."""
    sampling, local = FullParticipation(users), {"num_silos": silos}
    stddev = mechanism_of(plan(sampling), silos=silos).client_noise_stddev(silos)
    coarsest = stddev / 4 * (users + 2 * silos) / 2
    make(protocol=replace(SMALL, precision=0.999 * coarsest), sampling=sampling, **local)
    with pytest.raises(ValueError, match=f"expected at most about {coarsest:.3g}"):
        make(protocol=replace(SMALL, precision=1.001 * coarsest), sampling=sampling, **local)


@pytest.mark.parametrize(
    ("changes", "assumed"),
    [
        ({}, "every user has at most 60 records over all silos: otherwise the run ends"),
        ({"silo_record_limits": (20, 20, 20)}, None),
        ({"allowed_totals": (5, 10)}, "every user has 5 or 10 records over all silos, or none"),
        (
            {"allowed_totals": (5, 10), "silo_record_limits": (20, 20, 20)},
            "every user has 5 or 10 records over all silos, or none",
        ),
    ],
)
def test_guarantees_name_the_totals_that_no_silo_can_check(changes, assumed):
    strategy = make(protocol=replace(SMALL, **changes))
    strategy.participations.record(range(USERS), SILOS, needed=SILOS)
    guarantees = [g for g in strategy.guarantees() if g.basis == "provable"]
    assert len(guarantees) == 3
    for guarantee in guarantees:
        named = [text for text in guarantee.assumptions if text.startswith("every user has")]
        assert len(named) == (assumed is not None)
        assert all(text.startswith(str(assumed)) for text in named)
        assert all("the server may find" in text for text in named)


def test_small_keys_are_refused_by_clients_that_do_not_simulate():
    app = UldpAvg.client_app(task())
    grid = InProcessGrid(app, num_clients=SILOS)
    with pytest.raises(FederationNotReady, match="keys of 512 bits that may be insecure"):
        make(seeded_noise=False).start(grid, ArrayRecord(task().initial_params(SEED)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: PrivateWeighting(key_bits=1024), "key_bits=1024: expected at least 3072"),
        (lambda: PrivateWeighting(precision=0.0), r"precision=0\.0"),
        (lambda: PrivateWeighting(max_records_per_user=0), "max_records_per_user=0"),
        (lambda: PrivateWeighting(allowed_totals=(10, 9999)), r"allowed_totals=\(10, 9999\)"),
        (lambda: PrivateWeighting(silo_record_limits=(2000, 1)), "silo_record_limits"),
        (lambda: PrivateWeighting(max_records_per_user=2200), "does not fit a plaintext"),
        (lambda: make(protocol=replace(SMALL, precision=1e-20)), r"above 2\*\*61"),
        (lambda: make(num_silos=1), "silos=1"),
        (
            lambda: make(protocol=replace(SMALL, precision=10.0)),
            r"precision=10\.0: expected at most",
        ),
        (
            lambda: make(protocol=HIDDEN),
            "users are drawn at the rate 1; expected a multiple",
        ),
        (
            lambda: make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.5)),
            "draw_choices=5: users are drawn at the rate 0.5; expected a multiple",
        ),
        (lambda: make(diagnostics=True), "diagnostics=True"),
        (lambda: make(weighting="equal"), "with weighting='equal': expected UldpAvg"),
        (
            lambda: private_strategy_of(UldpSgd, plan=plan(), local=LOCAL, **COMMON),
            "ULDP-SGD has no local training",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_encrypted(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


def test_a_protocol_that_is_not_installed_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(protocols.plugins, "points", lambda group: ())
    protocols.protocols.cache_clear()
    message = "protocol='lattice': expected one of paillier; .*: pip install flower-ext-lattice"
    with pytest.raises(ValueError, match=message):
        make(protocol="lattice")
    protocols.protocols.cache_clear()


def test_by_name_a_protocol_has_its_default_settings():
    assert make(protocol="paillier").run.summation.protocol == PrivateWeighting()


def test_without_the_extra_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['phe'] = None\n"
        "from flower_ext.algorithms import uldp\n"
        "print(uldp.UldpAvg)\n"
        "uldp.weighted_sum()\n"
    )
    done = run_anew(code, "phe")
    assert done.returncode == 1
    assert "UldpAvg" in done.stdout  # the other sums work without it
    assert "pip install 'flower-ext[weighting]'" in done.stderr
