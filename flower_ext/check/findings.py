"""Turn what the check recognised and measured in an app into findings, each with its remedy.

If a finding *refutes*, no ε of the app is provable. Any other finding names something that the
guarantee does not cover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binom

from flower_ext.check import recognise
from flower_ext.check.app_folder import AppFolder
from flower_ext.check.held_run import TRAIN
from flower_ext.check.measured import Measured, release_gap, upload_gap
from flower_ext.check.mechanisms import Noise
from flower_ext.check.observe import Observed, Reply
from flower_ext.check.probes import AGAIN, LUCK, QUIET, REAL, Probes, exceeds, spread
from flower_ext.check.recognise import APP, Facts
from flower_ext.check.vectors import HELD
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import PrivacyUnit

_NORM_BIT = "norm_bit"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool = True
    place: str = ""
    """``path:line`` of the app's call that the remedy changes; empty if the app has none."""


def findings(probes: Probes, app: AppFolder, second: Measured | None) -> list[Finding]:
    """Return all findings of a check; those that refute come first.

    ``second`` holds the ε that the check computed from its measurements.
    """
    real = probes.runs[REAL]
    assert real is not None
    facts: Facts = real.facts
    every_finding = [
        *_structure(facts),
        *_rounds(real, facts),
        *_noise(probes, facts),
        *_bounds(probes, facts),
        *_second_opinion(second),
        *_changed_clients(probes, facts),
        *_messages(real, facts, app),
    ]
    once: dict[str, Finding] = {}
    for finding in every_finding:
        once.setdefault(finding.code, replace(finding, place=_place(finding.code, facts, app)))
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


def _place(code: str, facts: Facts, app: AppFolder) -> str:
    """Return the place in the app's source that the remedy of a finding changes."""
    if names := _CLIENT_CALLS.get(code):
        return app.call_of("clientapp", *names)
    if facts.local:
        return app.call_of("clientapp", recognise.LOCAL_MOD)
    classes = [part.name for part in facts.strategies]
    loops = ("send_and_receive", "push_messages") if code == "beside-the-strategy" else ()
    return app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")


def _structure(facts: Facts) -> Iterator[Finding]:
    for part in facts.strategies:
        if part.origin == APP:
            yield Finding(
                code="unknown-strategy",
                text=f"the strategy {part.name} is the app's; its methods may do anything",
                remedy="use a strategy of Flower or of flower_ext without overriding its methods",
            )
    if facts.foreign:
        yield Finding(
            code="foreign-parts",
            text=f"the app replaces parts on which the guarantee rests: {', '.join(facts.foreign)}",
            remedy="let the guarantee's parts come from flower_ext alone",
        )
    if not facts.strategies:
        yield Finding(
            code="unknown-loop",
            text="no strategy of flwr.serverapp runs the rounds; the app's loop may do anything",
            remedy="run the rounds by strategy.start of a known strategy",
        )
    if facts.noise is None and not facts.guarantees:
        yield Finding(
            code="no-mechanism",
            text="no mechanism that this check knows bounds what clients send and adds noise to it",
            remedy="protect uploads by FederatedStrategy with a ReleasePlan",
        )
    if any(facts.has(name) for name in recognise.SECURE_SUM_MODS):
        yield Finding(
            code="secure-sum",
            text="a secure sum hides single uploads from the server, but the sum itself is exact",
            remedy="add noise to the sum: it may reveal one client's data",
            refutes=False,
        )
    if facts.has(recognise.CLIENT_SIDE) and not facts.has(recognise.FIXED_MOD):
        yield _missing(recognise.FIXED_MOD)
    if facts.has(recognise.CLIENT_ADAPTIVE) and not facts.has(recognise.ADAPTIVE_MOD):
        yield _missing(recognise.ADAPTIVE_MOD)
    if facts.has(recognise.SERVER_ADAPTIVE) or facts.has(recognise.CLIENT_ADAPTIVE):
        yield Finding(
            code="adaptive-clipping",
            text="Flower scales the noise by the clipping norm after its update, not by the norm "
            "that bounded the updates",
            remedy="use fixed clipping, or a ReleasePlan with clipping=AdaptiveClipping()",
        )
    noise = facts.noise
    if noise is not None and not noise.release_stddev and not any(noise.upload_stddev.values()):
        yield Finding(
            code="no-noise", text="the noise multiplier is 0", remedy="set a noise multiplier"
        )
    if facts.strategies and not facts.is_ours and facts.noise is not None:
        last = facts.strategies[-1]
        if last.origin == "flwr" and not recognise.is_average(last) and facts.noise.cohort:
            yield Finding(
                code="not-a-mean",
                text=f"{last.name} releases no mean of the updates: one client may move it by "
                "more than clipping norm / number of clients",
                remedy="put FedAvg inside the private strategy",
            )
    if facts.local and facts.local["sensitivity"] < facts.local["clipping_norm"]:
        yield Finding(
            code="sensitivity",
            text=f"LocalDpMod scales its noise by sensitivity={facts.local['sensitivity']:g}, but "
            f"clips to {facts.local['clipping_norm']:g}: one client moves its upload by that much",
            remedy="set sensitivity to the clipping norm at least",
        )
    protecting = (
        recognise.LOCAL_MOD,
        recognise.FIXED_MOD,
        recognise.ADAPTIVE_MOD,
        recognise.OUR_MOD,
    )
    names = [part.name if part.origin != APP else "" for part in facts.mods]
    none = len(names) if facts.has_task else 0
    first = min((names.index(name) for name in protecting if name in names), default=none)
    outside = [part for part in facts.mods[:first] if not recognise.is_silent(part)]
    if outside:
        protection = [*names, "the client side of flower_ext"][first]
        yield Finding(
            code="mod-order",
            text=f"the mod {outside[0].name} stands before {protection} and may change the "
            "protected upload",
            remedy=f"put {protection} first, and all other mods after it",
        )
    if (engines := facts.engines_per_client) > 1:
        yield Finding(
            code="engine-restarts",
            text=f"a client makes a new Opacus engine {engines} times: each counts its own round "
            "only, so the printed ε leaves out all other rounds",
            remedy="keep the accountant's history in context.state, and add up all rounds",
        )


def _rounds(real: Observed, facts: Facts) -> Iterator[Finding]:
    """Find messages sent outside the strategy, several started runs, and too large cohorts."""
    if facts.strategies and real.beside:
        yield Finding(
            code="beside-the-strategy",
            text=f"the app asks clients for {', '.join(sorted(real.beside))} beside its strategy, "
            "which no guarantee counts",
            remedy="let strategy.start send all messages",
        )
    if real.starts > 1:
        yield Finding(
            code="several-runs",
            text=f"the app starts strategies {real.starts} times, each with a guarantee of its own",
            remedy="start one strategy, or charge all to one ledger",
        )
    if (
        facts.ours.declared is None
        or facts.stated is None
        or facts.stated.unit is not PrivacyUnit.CLIENT
    ):
        return  # no message shows which users or records the plan drew
    sampling = facts.ours.declared.release.sampling
    requests, draws = sum(map(len, real.trainings.values())), real.rounds * sampling.population
    if binom.sf(requests - 1, draws, sampling.sampling_rate) < LUCK:
        yield Finding(
            code="sampling",
            text=f"{requests} requests in {real.rounds} rounds are more than the plan's sampling "
            f"({sampling.describe()}) draws",
            remedy="ask the cohort that the plan's sampling draws",
        )


def _missing(mod: str) -> Finding:
    return Finding(
        code="mod-missing",
        text=f"the strategy relies on {mod}, but the ClientApp lacks it: nobody clips",
        remedy=f"add {mod} to the mods of the ClientApp, or clip on the server",
    )


def _noise(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Compare the measured noise with the noise that the app's parameters promise."""
    again, noise = probes.runs.get(AGAIN), facts.noise
    if again is None or noise is None:
        return
    for number in facts.comparable(probes.request.rounds):
        of_uploads: list[Finding] = []
        if (gap := upload_gap(probes, facts, number)) is not None:
            size = _largest(again, number)
            of_uploads = list(_compared(gap, size, f"uploads of round {number}"))
            yield from of_uploads
        changed = probes.target_noise("huge", "huge, other", number)
        stddev = noise.of_upload(probes.cohort(AGAIN, number))
        if stddev and not of_uploads and changed is not None:
            what = f"a changed client's upload in round {number}"
            # Noise of this package is in one of these runs only.
            stddev *= 1.0 if facts.has(recognise.OUR_MOD) else 2**0.5
            yield from _compared(changed / stddev, np.inf, what)
        if (gap := release_gap(probes, facts, number)) is not None:
            step = again.step(number)
            size = 0.0 if step is None else step.norm
            yield from _compared(gap, size, f"the model of round {number}")


def _largest(run: Observed, number: int) -> float:
    return max((upload.norm for upload in run.uploads(number).values()), default=0.0)


def _compared(gap: np.ndarray, size: float, what: str) -> Iterator[Finding]:
    measured = spread(gap)
    if measured.value < 1e-3 and size > 2 * HELD and np.isfinite(size):
        yield Finding(
            code="seeded-noise",
            text=f"the noise in {what} is the same under other random numbers: the code fixes "
            "its seed, and who knows the seed removes the noise",
            remedy="draw the noise from the operating system's randomness",
        )
    elif measured.value < 1e-3:
        yield Finding(
            code="noise-missing", text=f"there is no noise in {what}", remedy="add noise each round"
        )
    elif measured.high < 1:
        yield Finding(
            code="noise-small",
            text=f"the noise in {what} has {measured.value:.3g} times the promised standard "
            f"deviation (at most {measured.high:.3g} times, but for luck of 1e-6)",
            remedy="clip first and add the noise last, scaled by the clipping norm",
        )


def _bounds(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Find where one client moves its upload or the model farther than clipping permits."""
    if (noise := facts.noise) is None or not facts.holds:
        return
    clients_clip = facts.has(recognise.CLIENT_SIDE) or facts.has(recognise.CLIENT_ADAPTIVE)
    clients_clip = clients_clip or bool(facts.local) or any(noise.upload_stddev.values())
    noisy, past = not probes.is_exact, set()
    largest = noise.clipping_norm * (2 if noise.bounds_models else 1)
    for number in facts.comparable(probes.request.rounds):
        size = probes.cohort(QUIET, number)
        for name in ("huge", "heavy"):
            grown = probes.upload_growth(name, number) if clients_clip else None
            moved = probes.movement(name, number) if noise.cohort else None
            limits = (
                (grown, largest, noise.of_upload(size), "its upload"),
                (
                    moved,
                    noise.clipping_norm / (noise.cohort or 1),
                    noise.release_stddev,
                    "the model",
                ),
            )
            for value, bound, stddev, what in limits:
                if value is None or what in past:
                    continue
                if exceeds(abs(value), bound, noisy * stddev):
                    past.add(what)
                    yield _unbounded(what, number, abs(value), bound, weighs=name == "heavy")


def _second_opinion(second: Measured | None) -> Iterator[Finding]:
    if second is not None and not second.agrees:
        yield Finding(
            code="epsilon",
            text=f"the app states ε = {second.stated:.3g}, but {second.text}",
            remedy="let one plan set bound, noise and accounting, and change none of its parts",
        )


def _unbounded(what: str, number: int, value: float, bound: float, *, weighs: bool) -> Finding:
    text = f"one client moves {what} in round {number} by {value:.3g}, past the bound {bound:.3g}"
    if weighs:
        return Finding(
            code="weights",
            text=f"{text}, by the numbers that it reports",
            remedy="weigh all clients equally, and divide by a public constant",
        )
    return Finding(
        code="unclipped" if what == "its upload" else "movement",
        text=text,
        remedy="clip after everything that changes the update, and before the noise",
    )


def _changed_clients(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Find what one client's NaN, zero update or failure does to other clients and to the run."""
    again = probes.runs.get(AGAIN)
    if again is None or again.ended:
        return
    nan, zero, absent = (probes.runs.get(name) for name in ("nan", "zero", "raise"))
    if nan is not None and not facts.has_task:
        number = next((r.round for r in nan.replies if _is_nan(r)), None)
        clients_protect = facts.has(recognise.OUR_MOD) or bool(facts.local)
        if number is not None and clients_protect:
            yield _nan(f"a NaN leaves the client in round {number}")
    if nan is not None and not all(release.finite for release in nan.releases):
        yield _nan("one client's NaN reaches the model")
    for name, run, what in (
        ("nan", nan, "an update of NaN"),
        ("zero", zero, "an update of zeros"),
        ("absence", absent, "one client's failure"),
    ):
        if name in ("nan", "absence") and run is None and facts.has_task:
            continue
        if run is None and name != "zero":
            yield _ends(name, f"{what} hangs the run")
        elif run is not None and run.ended:
            yield _ends(name, f"{what} ends the run ({run.ended})")
        elif name == "absence" and facts.has_task and facts.ours.holds:
            continue  # such a client hides its failures: only the network can lose its reply
        elif run is not None and len(run.releases) < len(again.releases):
            yield _ends(name, f"{what} keeps the model of a round from being released")
    if zero is not None and any(reply.error for reply in zero.replies if reply.kind == TRAIN):
        yield _ends("zero", "an update of zeros makes a mod fail, which the server sees")
    failed = [] if absent is None or facts.has_task else absent.replies
    if any(reply.error for reply in failed if reply.kind == TRAIN):
        yield Finding(
            code="failures-seen",
            text="the server sees that a client failed, and Flower sends the error's text",
            remedy="answer with zeros and noise when training fails",
            refutes=False,
        )
    if nan is not None and not facts.secure_noise and not facts.has_task:
        target = nan.target(1)
        one, other = nan.uploads(1), again.uploads(1)
        if any(
            not np.array_equal(one[client].sample, other[client].sample)
            for client in one.keys() & other.keys() - {target}
        ):
            yield Finding(
                code="influence",
                text="one client's update changes what other clients send in the same round",
                remedy="keep no state in module variables, which clients of one process share",
            )


def _is_nan(reply: Reply) -> bool:
    return reply.kind == TRAIN and reply.upload is not None and not reply.upload.finite


def _nan(text: str) -> Finding:
    return Finding(
        code="nan",
        text=text,
        remedy="replace an update that is not finite by zeros before the noise",
    )


def _ends(code: str, text: str) -> Finding:
    return Finding(
        code=code,
        text=f"{text}: whether a model is released depends on one client's data",
        remedy="let no single reply end a round; sum what arrived, with noise for all",
    )


def _messages(real: Observed, facts: Facts, app: AppFolder) -> Iterator[Finding]:
    """Find what clients send besides the update, such as metrics and integer arrays."""
    if facts.has_task:
        return
    replies = [reply for reply in real.replies if reply.kind == TRAIN and not reply.error]
    protects_all = not facts.is_ours or facts.has(recognise.OUR_MOD)
    allowed = {facts.weighted_by} if facts.weighted_by and not facts.is_ours else set()
    if facts.has(recognise.CLIENT_ADAPTIVE):
        allowed.add(_NORM_BIT)
    if names := sorted({name for reply in replies for name in reply.metrics} - allowed):
        yield Finding(
            code="metrics",
            text=f"training replies carry values without noise: {_listed(names, app)}",
            remedy="return no metrics of the data from training",
            refutes=protects_all,
        )
    arrays = [sum(kind == "ArrayRecord" for kind, _ in reply.records) for reply in replies]
    if facts.strategies and any(count != 1 for count in arrays):
        yield Finding(
            code="records",
            text=f"training replies carry {max(arrays)} records of arrays; clipping and noise "
            "cover one",
            remedy="return one ArrayRecord",
        )
    if facts.noise is not None and any(reply.integers for reply in replies):
        yield Finding(
            code="integers",
            text="arrays of integers leave, which no Gaussian noise covers",
            remedy="leave counters such as num_batches_tracked out of the ArrayRecord",
        )
    if facts.noise is not None and not facts.is_ours and any(reply.scalars for reply in replies):
        yield Finding(
            code="scalars",
            text="a parameter without axes leaves unclipped",
            remedy="give each parameter an axis",
        )
    layouts = {(reply.records, tuple(reply.metrics)) for reply in replies}
    if facts.strategies and len(layouts) > 1:  # other loops may send messages of several stages
        yield Finding(
            code="names",
            text="names of records or metrics differ between clients, so they may carry data",
            remedy="use fixed names",
        )
    weights = {reply.metrics.get(facts.weighted_by) for reply in replies}
    if facts.noise is not None and facts.noise.cohort and not facts.is_ours and len(weights) > 1:
        yield Finding(
            code="weights",
            text="clients report different weights, which depend on their data",
            remedy="return the same weight from every client",
        )
    scored = [r for r in real.replies if r.kind == "evaluate" and not r.error]
    if names := sorted({name for reply in scored for name in reply.metrics}):
        yield Finding(
            code="evaluation",
            text=f"evaluation replies carry values without noise: {_listed(names, app)}",
            remedy="set fraction_evaluate=0.0, or SecureScores in a ReleasePlan",
            refutes=not facts.has(FederatedStrategy.__name__),
        )


def _listed(names: list[str], app: AppFolder) -> str:
    shown = list(dict.fromkeys(app.shown(name) for name in names))
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def promised(noise: Noise | None) -> str:
    """Describe the clipping and the noise that the app's parameters promise."""
    if noise is None:
        return "none that this check knows"
    uploads = [value for value in noise.upload_stddev.values() if value]
    if uploads:
        return f"clip {noise.clipping_norm:g}, noise {max(uploads):.4g} in each upload"
    return f"clip {noise.clipping_norm:g}, noise {noise.release_stddev:.4g} in the released mean"
