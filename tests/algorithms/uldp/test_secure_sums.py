"""Uldp-FL under secure sums: each user's part is whole numbers, and the server sees sums alone."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from scipy import stats

from flower_ext.algorithms.uldp import (
    UldpAvg,
    UldpGroup,
    UldpNaive,
    UldpSgd,
    averaging,
    silo_training,
    weighted_sum,
)
from flower_ext.data import Examples, SiloData
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    PoissonSampling,
    SecureSum,
    SeededNoise,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.training import DpSgdTraining, LocalTraining
from tests.support.grids import grid as grid_of
from tests.support.losing import Losing, stage_of
from tests.support.silos import COMMON, LOCAL, SEED, SILOS, USERS, plan, silo, silos, task
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder
from tests.support.uldp_runs import without

ALL = SecureSum(colluding=0.0, dropouts=0.0)
SERVER_RATE = COMMON["server"].learning_rate
METHODS = [
    pytest.param(partial(strategy_of, UldpAvg, local=LOCAL), id="avg"),
    pytest.param(partial(strategy_of, UldpAvg, local=LOCAL, weighting="by-records"), id="avg-w"),
    pytest.param(partial(strategy_of, UldpSgd), id="sgd"),
    pytest.param(partial(strategy_of, UldpSgd, weighting="by-records"), id="sgd-w"),
    pytest.param(partial(strategy_of, UldpNaive, local=LOCAL), id="naive"),
]
SAMPLED = PoissonSampling(USERS, 0.4)


def secure(sampling=None, sums=ALL, **changes):
    return plan(sampling, noise_placement=sums, **changes)


def run(strategy, data=None, grid=InProcessGrid, rounds=1, **facts):
    app = strategy.method.client_app(task(data), allow_seeded_noise=True)
    run_grid = grid(app, num_clients=strategy.method.num_silos)
    for name, value in facts.items():
        setattr(run_grid, name, frozenset(value))
    start = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(run_grid, start, num_rounds=rounds)
    return run_grid, records.to_arrays(result.arrays)


def noise_of(strategy, answered=range(SILOS)):
    """The noise of a first round's sum, which follows from the seed: silos' and the server's."""
    mechanism = strategy.run.mechanism
    share = mechanism.masked.share_stddev / mechanism.masked.cell
    nothing = {n: np.zeros(p.shape, np.int64) for n, p in task().initial_params(SEED).items()}
    total = dict(nothing)
    for number in answered:
        drawn = SeededNoise(SEED, "client-noise", number, 1).add_discrete_gaussian(nothing, share)
        total = {name: total[name] + drawn[name] for name in total}
    if missing := SILOS - len(answered):
        server = SeededNoise(SEED, "server-noise", 1)
        ordered = {name: total[name] for name in sorted(total)}
        total = server.add_discrete_gaussian(ordered, share * np.sqrt(missing))
    return {name: array * mechanism.masked.cell for name, array in total.items()}


@pytest.mark.parametrize(
    ("make", "sampling"),
    [pytest.param(*m.values, FullParticipation(USERS), id=m.id) for m in METHODS]
    + [pytest.param(*m.values, SAMPLED, id=f"{m.id}-poisson") for m in METHODS if m.id != "naive"],
)
def test_the_model_equals_plain_sums_up_to_known_noise_and_rounding(make, sampling):
    ours = make(plan=secure(sampling), **COMMON)
    theirs = make(plan=plan(sampling, noise_multiplier=1e-9), **COMMON)
    (_, one), (_, other) = run(ours), run(theirs)
    assert ours.refusals == []
    divisor = ours.run.mechanism.sampling.expected_cohort_size
    divisor *= 1 if isinstance(ours.method, UldpNaive) else SILOS
    # Half a cell a user and silo, and the few cells by which a clipped one is shortened.
    room = 6 * ours.run.mechanism.masked.cell * USERS * SILOS / divisor * SERVER_RATE
    for name, noise in noise_of(ours).items():
        clean = one[name] - SERVER_RATE * noise / divisor
        np.testing.assert_allclose(clean, other[name], atol=room + 2e-6)
        assert np.abs(one[name] - other[name]).max() > 20 * room  # the noise is there


def cells_of(data, weighting="by-records", norm=0.01, local=LOCAL):
    """Each silo's sum in cells, before noise; all users are asked."""
    strategy = strategy_of(
        UldpAvg, plan=secure(clipping_norm=norm), weighting=weighting, local=local, **COMMON
    )
    cells = []
    real = silo_training.add_users

    def kept(task, jobs, **options):
        nothing = real(task, jobs, **options)
        cells.extend(job.total.value for job in jobs)
        return nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo_training, "add_users", kept)
        run(strategy, data)
    return cells, norm / strategy.run.mechanism.masked.cell


@pytest.mark.parametrize("weighting", ["equal", "by-records"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_user_moves_the_sum_over_silos_by_exactly_the_clipping_norm(weighting, scale):
    data = silos()
    for one in data:  # a user who pulls the same way in every silo, as hard as it can
        mine = one.owners == 3
        one.train.features[mine] = scale * torch.ones_like(one.train.features[mine])
        one.train.targets[mine] = 0
    (with_user, most), (others, _) = (
        cells_of(each, weighting) for each in (data, without(3, data))
    )
    moved = 0
    for name in with_user[0].value:
        difference = sum(one.value[name] for one in with_user) - sum(
            one.value[name] for one in others
        )
        moved += int(np.vdot(difference, difference))
    assert 0 < moved <= most**2


def test_no_user_moves_a_whole_number_of_another():
    """A silo's sum is that of its users, each of whom trains without the others."""
    (everyone, _) = cells_of(silos())
    number = 1  # all silos run the same code
    summed = dict.fromkeys(everyone[number].value, 0)
    for user in range(USERS):
        data = silos()
        data[number] = without_all_but(user, data[number])
        cells = cells_with_weights_of_all(data, number)
        summed = {name: array + cells.value[name] for name, array in summed.items()}
    for name, array in everyone[number].value.items():
        np.testing.assert_array_equal(summed[name], array)


def without_all_but(user, one):
    kept = one.owners == user
    train = Examples(one.train.features[kept], one.train.targets[kept])
    return SiloData(train=train, test=one.test, owners=one.owners[kept])


def cells_with_weights_of_all(data, number):
    """One silo's sum in cells with the weights that the whole federation's histogram gives."""
    counted = silos()
    with pytest.MonkeyPatch.context() as patch:
        real = averaging.ask_silos

        def asked(*args, **more):
            real(*args, **more)
            counts = [np.bincount(one.owners.numpy(), minlength=USERS) for one in counted]
            return np.stack(counts)

        patch.setattr(averaging, "ask_silos", asked)
        return cells_of(data)[0][number]


@pytest.mark.parametrize("make", [METHODS[0], METHODS[4]])
def test_where_none_may_be_lost_a_lost_silo_discards_the_round(make, logged):
    strategy = make(plan=secure(), **COMMON)
    _, model = run(strategy, grid=Losing, lost=[(1, "train")])
    start = task().initial_params(SEED)
    for name, array in model.items():
        np.testing.assert_array_equal(array, start[name])
    assert "round 1 discarded" in logged.text
    assert strategy.participations.in_sums == 0  # nobody saw a sum


def test_if_a_silo_drops_out_the_noise_is_still_as_planned():
    still = LocalTraining(epochs=1, batch_size=4, learning_rate=1e-30)
    sums = SecureSum(colluding=0.0, dropouts=0.3, resist_equivocation=False)
    for lost in ((), (2,)):
        strategy = strategy_of(UldpAvg, plan=secure(sums=sums), local=still, **COMMON)
        assert strategy.run.mechanism.masked.parameters.least_answers == 2
        _, model = run(strategy, grid=Losing, lost=[(number, "train") for number in lost])
        noise = noise_of(strategy, [number for number in range(SILOS) if number not in lost])
        for name, start in task().initial_params(SEED).items():
            expected = start.numpy() + SERVER_RATE * noise[name] / USERS / SILOS
            np.testing.assert_allclose(model[name], expected, atol=1e-6)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1.0])
def test_members_and_noise_do_not_reveal_how_many_users_were_drawn(drawn, monkeypatch):
    """The sum's noise does not show how many users Poisson sampling drew."""
    users = range(round(drawn * USERS))
    monkeypatch.setattr(PoissonSampling, "draw", lambda self, rng, past: list(users))
    strategy = strategy_of(UldpAvg, plan=secure(SAMPLED), local=LOCAL, **COMMON)
    grid, _ = run(strategy, grid=Recorder)
    requests = [m.content[records.ROUND] for m in grid.sent if stage_of(m) == "train"]
    assert len(requests) == SILOS
    mechanism = strategy.run.mechanism
    assert {round_["noise-stddev"] for round_ in requests} == {mechanism.masked.share_stddev}
    assert mechanism.masked.bits == 32
    assert mechanism.num_members == SILOS
    sizes = {len(r.content[records.UPDATE]["message"].numpy()) for r in uploads(grid)}
    assert len(sizes) == 1


def uploads(grid):
    return [r for r in grid.received if r.metadata.message_type.startswith("train")]


@pytest.mark.parametrize("make", grid_of(METHODS, {"avg-w", "sgd", "naive"}.__contains__))
def test_nothing_but_a_masked_sum_leaves_a_silo_in_training(make):
    strategy = make(plan=secure(), **{**COMMON, "seeded_noise": False})
    grid, _ = run(strategy, grid=Recorder, rounds=10)
    sent = [reply.content for reply in uploads(grid)]
    assert len(sent) == 10 * SILOS
    assert {tuple(content.keys()) for content in sent} == {(records.UPDATE,)}
    numbers = sum(p.numel() for p in task().initial_params(SEED).values())
    masked = [content[records.UPDATE]["message"].numpy()[-4 * numbers :] for content in sent]
    counts = np.bincount(np.concatenate(masked), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-10


def by_view(strategy, basis="provable"):
    return {one.view: one for one in strategy.guarantees() if one.basis == basis}


@pytest.mark.parametrize("make", METHODS)
def test_no_guarantee_assumes_what_the_run_does_not_provide(make):
    strategy = make(plan=secure(), **COMMON)
    run(strategy)
    assumed = [text for one in strategy.guarantees() for text in one.assumptions]
    assert not any("which this run does not provide" in text for text in assumed)
    sums = by_view(strategy)[AdversaryView.SUM_ONLY].assumptions
    assert any("at most 0 of each cohort of 3 collude" in text for text in sums)
    assert any("sums of at least 3 uploads" in text for text in sums)
    assert any("discrete Gaussian" in text for text in sums)


def test_sums_are_not_amplified_since_the_server_knows_whom_it_drew():
    strategy = strategy_of(UldpAvg, plan=secure(SAMPLED), local=LOCAL, **COMMON)
    run(strategy, rounds=3)
    guarantees = by_view(strategy)
    amplified = privacy_loss_of({strategy.run.mechanism.release: 3}, delta=1e-5).epsilon
    assert guarantees[AdversaryView.RELEASED_MODELS].epsilon == pytest.approx(amplified)
    most = max(strategy.participations.uploads.values())
    plainly = gaussian_loss(0.4, releases=most, delta=1e-5).epsilon
    assert guarantees[AdversaryView.SUM_ONLY].epsilon == pytest.approx(plainly)


@pytest.mark.parametrize("weighting", ["equal", "by-records"])
def test_colluding_silos_cost_their_noise_if_a_user_lies_only_in_others(weighting):
    """With equal weights the others send a smaller part of the user by as much."""
    sums = SecureSum(colluding=0.33, dropouts=0.0)
    strategy = strategy_of(
        UldpAvg, plan=secure(sums=sums), weighting=weighting, local=LOCAL, **COMMON
    )
    run(strategy, rounds=2)
    worth = 1.0 if weighting == "equal" else np.sqrt(2 / 3)
    expected = gaussian_loss(0.4 * worth, releases=2, delta=1e-5).epsilon
    guarantees = by_view(strategy)[AdversaryView.SUM_ONLY]
    assert guarantees.epsilon == pytest.approx(expected)
    assert any("at most 1 of each cohort of 3 collude" in text for text in guarantees.assumptions)


def test_with_weights_by_records_histograms_stay_listed_as_not_covered():
    strategy = strategy_of(UldpAvg, plan=secure(), weighting="by-records", local=LOCAL, **COMMON)
    run(strategy)
    shown = by_view(strategy)[AdversaryView.SUM_ONLY].not_covered
    assert any("the silos tell the server" in text for text in shown)


def test_what_has_no_secure_sum_over_silos_is_refused_by_name():
    with pytest.raises(ValueError, match="a cohort of 2: expected at least 3"):
        FederatedStrategy(UldpAvg(num_silos=2), secure())
    with pytest.raises(ValueError, match="a cohort of 2: expected at least 3"):
        FederatedStrategy(UldpNaive(num_silos=2), secure())
    steps = DpSgdTraining(
        steps=4,
        sampling_rate=0.4,
        batch_size=8.0,
        learning_rate=0.5,
        clipping_norm=0.7,
        noise_multiplier=0.5,
    )
    group = UldpGroup(num_silos=3, num_users=USERS, group_size=2, local=steps)
    with pytest.raises(ValueError, match=r"expected the plan that UldpGroup\.plan\(delta\)"):
        FederatedStrategy(group, secure())


def test_private_weighting_has_a_dedicated_secure_sum():
    pytest.importorskip("gmpy2")
    with pytest.raises(ValueError, match="SecureSum.* of the plan: expected 'client'"):
        FederatedStrategy(
            UldpAvg(num_silos=3, weighting="by-records"),
            secure(),
            sum=weighted_sum(),
        )


def test_a_silo_refuses_a_protection_that_bounds_no_single_user(monkeypatch):
    strategy = strategy_of(UldpAvg, plan=secure(), local=LOCAL, **COMMON)
    of_clients = ClipAndNoise(clipping_norm=0.7, noise_stddev=1.0, cell=2.0**-9)
    monkeypatch.setattr(ReleaseMechanism, "protection", lambda *_: of_clients)
    with pytest.raises(
        RuntimeError, match="asks for the protection ClipAndNoise: expected one that clips"
    ):
        run(strategy)


def test_a_silo_without_records_takes_part_with_nothing_but_its_noise():
    data = [*silos(2), silo(2, records_=0)]
    strategy = strategy_of(UldpAvg, plan=secure(), local=LOCAL, **COMMON)
    grid, _ = run(strategy, data, grid=Recorder)
    assert strategy.refusals == []
    assert len(uploads(grid)) == SILOS


def test_a_user_whose_training_diverges_adds_nothing_and_nobody_sees_it():
    data = silos()
    data[0].train.features[data[0].owners == 4] = 1e38
    strategy = strategy_of(
        UldpAvg, plan=secure(), local=replace(LOCAL, learning_rate=1e3), **COMMON
    )
    _, model = run(strategy, data)
    assert strategy.refusals == []
    assert all(np.isfinite(array).all() for array in model.values())


def test_cells_that_are_too_wide_for_so_many_numbers_are_named(logged):
    wide = secure(noise_multiplier=2.0**13)
    run(strategy_of(UldpAvg, plan=wide, local=LOCAL, **COMMON))
    assert "so rounding loses most of the update" in logged.text
