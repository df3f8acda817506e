"""Find faults of an app in what the check recognised and measured, and name the remedy of each.

Some findings *refute*: with such a finding, no ε of the app is provable. Every other finding names
something that the guarantee does not cover.

All measurements come from held runs (`held_run`). There each client sends a public update in place
of what it learned from data, so the check knows each update before clipping and noise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np
from scipy.stats import binom

from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import PrivacyUnit
from flower_ext_check import recognise
from flower_ext_check.held_run import TRAIN
from flower_ext_check.measured import LUCK, Measured, release_gap, spread, upload_gap
from flower_ext_check.mechanisms import Noise
from flower_ext_check.probes import AGAIN, QUIET, Probes
from flower_ext_check.recognise import APP
from flower_ext_check.vectors import HELD

_MOST_SHOWN = 6
_DEVIATIONS = 6.5
"""Standard deviations that a Gaussian exceeds with probability `LUCK` / 100."""


@dataclass(frozen=True)
class Finding:
    """One fault of an app, or one limit of the app's guarantee, that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool = True
    place: str = ""
    """``path:line`` of the app's call that the remedy changes; "" if the app has none."""


def findings(probes: Probes, second: Measured | None) -> list[Finding]:
    """Return all findings of a check, beginning with those that leave no ε provable.

    ``second`` holds the ε that the check computed from its measurements.
    """
    once: dict[str, Finding] = {}
    for finding in chain(
        _unknown_parts(probes),
        _wrong_parts(probes),
        _wrong_rounds(probes),
        _wrong_noise(probes),
        _exceeded_bounds(probes),
        _wrong_epsilon(second),
        _changed_clients(probes),
        _unprotected_values(probes),
    ):
        once.setdefault(finding.code, replace(finding, place=_place(finding.code, probes)))
    return sorted(once.values(), key=lambda finding: not finding.refutes)


_CLIENT_CALLS = {
    **dict.fromkeys(("mod-missing", "mod-order"), ("ClientApp", "train")),
    **dict.fromkeys(("sensitivity", "secure-sum"), ("LocalDpMod", "ClientApp")),
    **dict.fromkeys(
        ("metrics", "records", "integers", "scalars", "names", "weights", "influence"),
        ("train", "ClientApp"),
    ),
    "failures-seen": ("train", "ClientApp"),
    "engine-restarts": ("make_private",),
}
"""For each code of a finding, the calls in the client's source that the remedy changes."""


def _place(code: str, probes: Probes) -> str:
    app, traits = probes.app, probes.traits
    if names := _CLIENT_CALLS.get(code):
        return app.call_of("clientapp", *names)
    if traits.local:
        return app.call_of("clientapp", recognise.LOCAL_MOD)
    classes = [part.name for part in traits.strategies]
    loops = ("send_and_receive", "push_messages") if code == "beside-the-strategy" else ()
    return app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")


def _unknown_parts(probes: Probes) -> Iterator[Finding]:
    """Find parts that this check does not know, so that it cannot prove anything about them."""
    traits = probes.traits
    for part in traits.strategies:
        if part.origin == APP:
            yield Finding(
                "unknown-strategy",
                f"the strategy {part.name} is the app's own, so its methods may do anything",
                "use a strategy of Flower or of flower_ext without overriding its methods",
            )
    if traits.foreign:
        yield Finding(
            "foreign-parts",
            f"the app replaces parts on which the guarantee rests: {', '.join(traits.foreign)}",
            "let the guarantee's parts come from flower_ext alone",
        )
    if not traits.strategies:
        yield Finding(
            "unknown-loop",
            "no strategy of flwr.serverapp runs the rounds; the app's loop may do anything",
            "run the rounds by strategy.start of a known strategy",
        )
    if traits.noise is None and not traits.guarantees:
        yield Finding(
            "no-mechanism",
            "no mechanism that this check knows bounds what clients send and adds noise to it",
            "protect uploads by FederatedStrategy with a ReleasePlan",
        )
    if any(map(traits.has, recognise.SECURE_SUM_MODS)):
        yield Finding(
            "secure-sum",
            "a secure sum hides single uploads from the server, but the sum itself is exact",
            "add noise to the sum: it may reveal one client's data",
            refutes=False,
        )


_MODS_OF_STRATEGIES = {
    recognise.CLIENT_SIDE: recognise.FIXED_MOD,
    recognise.CLIENT_ADAPTIVE: recognise.ADAPTIVE_MOD,
}


def _wrong_parts(probes: Probes) -> Iterator[Finding]:
    """Find strategies and mods whose parameters or order break the promise."""
    traits, noise, local = probes.traits, probes.traits.noise, probes.traits.local
    for strategy, mod in _MODS_OF_STRATEGIES.items():
        if traits.has(strategy) and not traits.has(mod):
            yield Finding(
                "mod-missing",
                f"the strategy relies on {mod}, but the ClientApp lacks it, so no client clips",
                f"add {mod} to the mods of the ClientApp, or clip on the server",
            )
    if traits.has(recognise.SERVER_ADAPTIVE) or traits.has(recognise.CLIENT_ADAPTIVE):
        yield Finding(
            "adaptive-clipping",
            "Flower scales the noise by the clipping norm after its update, not by the norm that "
            "bounded the updates",
            "use fixed clipping, or a ReleasePlan with clipping=AdaptiveClipping()",
        )
    if noise is not None and not (noise.release_stddev or any(noise.upload_stddev.values())):
        yield Finding("no-noise", "the noise multiplier is 0", "set a noise multiplier")
    if traits.strategies and not traits.is_ours and noise is not None and noise.cohort:
        # A private strategy of Flower bounds only what one client adds to a mean.
        last = traits.strategies[-1]
        if last.origin == "flwr" and last.name not in recognise.AVERAGES:
            yield Finding(
                "not-a-mean",
                f"{last.name} releases no mean of the updates: one client may move it by more than "
                "clipping norm / number of clients",
                "put FedAvg inside the private strategy",
            )
    if local and local["sensitivity"] < local["clipping_norm"]:
        yield Finding(
            "sensitivity",
            f"LocalDpMod scales its noise by sensitivity={local['sensitivity']:g}, but clips to "
            f"{local['clipping_norm']:g}: one client moves its upload by that much",
            "set sensitivity to the clipping norm at least",
        )
    names = [part.name if part.origin != APP else "" for part in traits.mods]
    last_place = len(names) if traits.has_task else 0
    first = min(
        (names.index(name) for name in recognise.PROTECTING_MODS if name in names),
        default=last_place,
    )
    protection = [*names, "the client side of flower_ext"][first]
    for part in traits.mods[:first]:
        if part.origin != "flwr" or part.name not in recognise.SILENT_MODS:
            yield Finding(
                "mod-order",
                f"the mod {part.name} stands before {protection} and may change the protected "
                "upload",
                f"put {protection} first, and all other mods after it",
            )
    if traits.engines_per_client > 1:
        yield Finding(
            "engine-restarts",
            f"a client makes a new Opacus engine {traits.engines_per_client} times: each counts "
            "its own round only, so the printed ε leaves out all other rounds",
            "keep the accountant's history in context.state, and add up all rounds",
        )


def _wrong_rounds(probes: Probes) -> Iterator[Finding]:
    """Find messages and runs that the guarantee does not count."""
    real, traits, stated = probes.real, probes.traits, probes.traits.stated
    if traits.strategies and real.beside:
        yield Finding(
            "beside-the-strategy",
            f"the app sends clients messages ({', '.join(sorted(real.beside))}) outside its "
            "strategy, and no guarantee counts them",
            "let strategy.start send all messages",
        )
    if real.starts > 1:
        yield Finding(
            "several-runs",
            f"the app starts strategies {real.starts} times, each with a guarantee of its own",
            "start one strategy, or charge all strategies to one ledger",
        )
    # If the plan draws users or records, no message shows which.
    if traits.mechanism.declared and stated is not None and stated.unit is PrivacyUnit.CLIENT:
        sampling = traits.mechanism.declared.release.sampling
        requests, draws = sum(map(len, real.trainings.values())), real.rounds * sampling.population
        if binom.sf(requests - 1, draws, sampling.sampling_rate) < LUCK:
            yield Finding(
                "sampling",
                f"{requests} requests in {real.rounds} rounds are more than the plan's sampling "
                f"({sampling.describe()}) draws",
                "ask the cohort that the plan's sampling draws",
            )


def _wrong_noise(probes: Probes) -> Iterator[Finding]:
    """Compare the measured noise with the noise that the app's parameters promise."""
    again, noise = probes.runs.get(AGAIN), probes.traits.noise
    if again is None or noise is None:
        return
    for number in probes.comparable:
        of_uploads: list[Finding] = []
        if (gap := upload_gap(probes, number)).size:
            size = max((upload.norm for upload in again.uploads(number).values()), default=0.0)
            of_uploads = list(_compared(gap, size, f"uploads of round {number}"))
            yield from of_uploads
        one, other = (probes.seen(name).target_upload(number) for name in ("huge", "huge, other"))
        stddev = noise.of_upload(len(again.cohort(number)))
        if stddev and not of_uploads and one and other and one.finite and other.finite:
            # If the noise comes from this package, only one of the two runs adds it.
            stddev *= 1.0 if probes.traits.has(recognise.OUR_MOD) else 2**0.5
            what = f"a changed client's upload in round {number}"
            yield from _compared((one.sample - other.sample) / stddev, np.inf, what)
        if (gap := release_gap(probes, number)).size:
            step = again.step(number)
            size = 0.0 if step is None else step.norm
            yield from _compared(gap, size, f"the model of round {number}")


def _compared(gap: np.ndarray, size: float, what: str) -> Iterator[Finding]:
    measured = spread(gap)
    if measured.value < 1e-3 and size > 2 * HELD and np.isfinite(size):
        yield Finding(
            "seeded-noise",
            f"the noise in {what} is the same in two runs with different random numbers: the code "
            "fixes the seed, and anyone who knows the seed can remove the noise",
            "draw the noise from the operating system's randomness",
        )
    elif measured.value < 1e-3:
        yield Finding("noise-missing", f"there is no noise in {what}", "add noise in every round")
    elif measured.high < 1:
        yield Finding(
            "noise-small",
            f"the noise in {what} has {measured.value:.3g} times the promised standard deviation "
            f"(at most {measured.high:.3g} times, except with probability 1e-6)",
            "clip first and add the noise last, scaled by the clipping norm",
        )


def _exceeded_bounds(probes: Probes) -> Iterator[Finding]:
    """Find where one client moves its upload or the model farther than clipping permits."""
    if probes.traits.noise is None or not probes.traits.holds:
        return
    is_exact, past = probes.is_exact, set[str]()
    for number, run in product(probes.comparable, ("huge", "heavy")):
        for what, moved, bound, stddev in _movements(probes, probes.traits.noise, run, number):
            # Neither noise nor rounding may count as a movement.
            slack = 2 * HELD + (0.0 if is_exact else _DEVIATIONS * stddev * 2**0.5)
            if what in past or moved is None or not abs(moved) > bound * 1.01 + slack:
                continue
            past.add(what)
            text = f"one client moves {what} in round {number} by {abs(moved):.3g}, past the bound "
            if run == "heavy":
                yield Finding(
                    "weights",
                    f"{text}{bound:.3g}, because it reports the weight of its own update",
                    "weigh all clients equally, and divide by a public constant",
                )
            else:
                yield Finding(
                    "unclipped" if what == "its upload" else "movement",
                    f"{text}{bound:.3g}",
                    "clip after everything that changes the update, and before the noise",
                )


def _movements(
    probes: Probes, noise: Noise, run: str, number: int
) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield the name of each value that the changed client moves, and three numbers.

    The numbers are how far the client moved the value along `direction` (None if this was not
    measured), how far clipping lets the client move it, and the standard deviation of the noise on
    the value.
    """
    traits, held = probes.traits, probes.seen(QUIET)
    clients_clip = traits.has(recognise.CLIENT_SIDE) or traits.has(recognise.CLIENT_ADAPTIVE)
    if clients_clip or traits.local or any(noise.upload_stddev.values()):
        upload, moved = probes.seen(run).target_upload(number), None
        usual = [each.along for each in held.uploads(number).values()]
        if upload is not None and upload.finite and usual:
            moved = upload.along - float(np.median(usual))
        bound = noise.clipping_norm * (2 if noise.bounds_models else 1)
        yield "its upload", moved, bound, noise.of_upload(len(held.cohort(number)))
    if noise.cohort:
        bound = noise.clipping_norm / noise.cohort
        yield "the model", probes.movement(run, number), bound, noise.release_stddev


def _wrong_epsilon(second: Measured | None) -> Iterator[Finding]:
    """Find a stated ε that is smaller than the ε that the check computed from measurements."""
    if second is not None and not second.agrees:
        yield Finding(
            "epsilon",
            f"the app states ε = {second.stated:.3g}, but {second.text}",
            "let one plan set the clipping bound, the noise and the accounting, and change none of "
            "its parts",
        )


_CHANGES = {
    "nan": ("nan", "an update of NaN"),
    "zero": ("zero", "an update of zeros"),
    "raise": ("absence", "one client's failure"),
}
"""Code and words of a finding for each `Change` that may end a run."""


def _changed_clients(probes: Probes) -> Iterator[Finding]:
    """Find what one client's NaN, zero update or failure does to other clients and to the run."""
    usual, nan, traits = probes.runs.get(AGAIN), probes.seen("nan"), probes.traits
    if usual is None or usual.ended:
        return
    no_nan = "replace an update that is not finite by zeros before the noise"
    if not traits.has_task and (traits.has(recognise.OUR_MOD) or traits.local):
        for reply in nan.replies:
            if reply.kind == TRAIN and reply.upload and not reply.upload.finite:
                yield Finding("nan", f"a NaN leaves the client in round {reply.round}", no_nan)
    if any(not release.finite for release in nan.releases):
        yield Finding("nan", "one client's NaN reaches the model", no_nan)
    for change, (code, words) in _CHANGES.items():
        if ending := _ending(change, probes, usual.unreleased):
            yield Finding(
                code,
                f"{words} {ending}: whether a model is released depends on one client's data",
                "let no single reply end a round: sum the replies that arrived, and add noise that "
                "does not depend on their number",
            )
    if not traits.has_task and _fails("raise", probes):
        yield Finding(
            "failures-seen",
            "the server sees that a client failed, and Flower sends the error's text",
            "answer with zeros and noise when training fails",
            refutes=False,
        )
    uploads, uploads_as_usual = nan.uploads(1), usual.uploads(1)
    others = uploads.keys() & uploads_as_usual.keys() - {nan.target(1)}
    if not (traits.secure_noise or traits.has_task) and any(
        not np.array_equal(uploads[c].sample, uploads_as_usual[c].sample) for c in others
    ):
        yield Finding(
            "influence",
            "one client's update changes what other clients send in the same round",
            "keep no state in module variables, which clients of one process share",
        )


def _ending(change: str, probes: Probes, unreleased: int) -> str:
    """Say how a changed client disturbs the run ``change``; "" if it does not.

    ``unreleased`` rounds of a run without a changed client release no model.
    """
    run, traits = probes.runs.get(change), probes.traits
    if run is None:
        return "" if change == "zero" or traits.has_task else "hangs the run"
    if run.ended:
        if traits.has_task and all(len(cohort) == 1 for cohort in run.trainings.values()):
            return ""  # the draws asked the changed client alone, so no reply was usable
        return f"ends the run ({run.ended})"
    if change == "raise" and traits.has_task and traits.holds:
        return ""  # such a client hides its failures: only the network can lose its reply
    if run.unreleased > unreleased:
        return "keeps the model of a round from being released"
    is_seen = change == "zero" and _fails(change, probes)
    return "makes a mod fail, which the server sees" if is_seen else ""


def _fails(change: str, probes: Probes) -> bool:
    """Return True if, in the run ``change``, a client answers a training request with an error."""
    return any(reply.error and reply.kind == TRAIN for reply in probes.seen(change).replies)


def _unprotected_values(probes: Probes) -> Iterator[Finding]:
    """Find what clients send besides the update, such as metrics and integer arrays."""
    traits, noise, replies = probes.traits, probes.traits.noise, probes.real.answers(TRAIN)
    if traits.has_task:
        return
    allowed = {traits.weighted_by} if traits.weighted_by and not traits.is_ours else set()
    if traits.has(recognise.CLIENT_ADAPTIVE):
        allowed.add("norm_bit")
    if (names := _metrics(probes, TRAIN, allowed)) is not None:
        yield Finding(
            "metrics",
            f"training replies carry values without noise: {names}",
            "return no metrics of the data from training",
            refutes=not traits.is_ours or traits.has(recognise.OUR_MOD),
        )
    if traits.strategies:  # an app's own loop may send several kinds of messages
        counts = {sum(kind == "ArrayRecord" for kind, _ in reply.records) for reply in replies}
        if counts - {1}:
            yield Finding(
                "records",
                f"training replies carry {max(counts)} records of arrays; clipping and noise cover "
                "one",
                "return one ArrayRecord",
            )
    if noise and any(reply.integers for reply in replies):
        yield Finding(
            "integers",
            "clients send arrays of integers, which Gaussian noise does not cover",
            "leave counters such as num_batches_tracked out of the ArrayRecord",
        )
    if noise and not traits.is_ours and any(reply.scalars for reply in replies):
        yield Finding(
            "scalars",
            "a parameter without axes (a single number) leaves clients without clipping",
            "give each parameter an axis",
        )
    layouts = {(reply.records, tuple(reply.metrics)) for reply in replies}
    if traits.strategies and len(layouts) > 1:
        yield Finding(
            "names",
            "names of records or metrics differ between clients, so they may carry data",
            "use fixed names",
        )
    weights = {reply.metrics.get(traits.weighted_by) for reply in replies}
    if noise and noise.cohort and not traits.is_ours and len(weights) > 1:
        yield Finding(
            "weights",
            "clients report different weights, which depend on their data",
            "return the same weight from every client",
        )
    if (names := _metrics(probes, "evaluate")) is not None:
        yield Finding(
            "evaluation",
            f"evaluation replies carry values without noise: {names}",
            "set fraction_evaluate=0.0, or SecureScores in a ReleasePlan",
            refutes=not traits.has(FederatedStrategy.__name__),
        )


def _metrics(probes: Probes, kind: str, allowed: Collection[str] = ()) -> str | None:
    """Return a list of the metrics in replies of one kind that are not allowed; None if empty."""
    names = {name for reply in probes.real.answers(kind) for name in reply.metrics}
    if not (names := names - set(allowed)):
        return None
    shown = list(dict.fromkeys(map(probes.app.shown, sorted(names))))
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more
