"""The report of a run: ``report.md``, and ``report.html`` with the figures inside.

The report begins with the results: the quality of the clients' models and the proved ε. Figures
follow, then the basis of each guarantee; the papers' claims come after the provable guarantees.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

from flower_ext.evaluation import summarize
from flower_ext.privacy import AdversaryView, Guarantee, Release, epsilon_text, privacy_loss_of
from flower_ext.privacy.theorems.assumptions import NOT_PROVIDED
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.figures import draw_figures, in_words, qualities
from flower_ext.runs.page import Markup, escaped, table, write_page
from flower_ext.runs.scores import lower_is_better, noised_scores, reported_by_few

_MOST_SHOWN = 10
"""Largest number of rare scores that the report names."""


def write_report(run: RunDirectory) -> Path:
    """Write ``report.md`` and ``report.html`` into the run directory; return the HTML's path."""
    figures = draw_figures(run, run.path / "figures")
    return write_page(run.path, "report", "\n\n".join(_sections(run, figures)), title=_title(run))


def _title(run: RunDirectory) -> str:
    config = run.config
    method = str(config.get("method", "Run"))
    return f"{method} on {config['dataset']}" if "dataset" in config else method


def _sections(run: RunDirectory, figures: dict[str, str]) -> list[str]:
    guarantees = sorted(run.guarantees(), key=lambda each: each.basis == "published")
    sections = [f"# {_title(run)}", *_state(run), *_verdict(run, guarantees)]
    if figures:
        sections += [f"![{escaped(title)}](figures/{file})" for file, title in figures.items()]
        sections.append("The numbers of each figure are in `figures/`, as CSV.")
    sections += ["## Privacy", *_privacy(run, guarantees), "## Scores", *_scores(run)]
    sections += ["## Rounds", _rounds(run)]
    if missing := run.missing():
        sections += ["## Missing answers", _missing(missing)]
    sections += ["## Configuration", table(("setting", "value"), sorted(run.config.items()))]
    sections += ["## Versions", table(("package", "version"), run.facts["versions"].items())]
    return sections


def _state(run: RunDirectory) -> list[str]:
    """Return lines on how the run ended, if it did not complete, and where it was resumed."""
    facts = run.facts
    lines = []
    if facts["status"] != "completed":
        reason = f": {escaped(facts['reason'])}" if facts.get("reason") else ""
        if facts["status"] == "running":
            reason = ", or ended without recording its status"
        lines.append(f"> **This run is {facts['status']}**{reason}")
    if later := [str(start["after_round"]) for start in facts.get("starts", [])[1:]]:
        lines.append(f"Resumed after round {', '.join(later)}.")
    if behind := _behind(run):
        lines.append(behind)
    return lines


def _verdict(run: RunDirectory, guarantees: list[Guarantee]) -> list[str]:
    """Return a sentence on the models and one on privacy."""
    said = []
    for name, scores in _by_quality(run).items():
        spread = summarize(scores, lower_is_better=lower_is_better(name))
        said.append(
            f"{escaped(in_words(name).capitalize())} of the clients' models: "
            f"**{spread.mean:.3f}** on average, {spread.worst_decile:.3f} over their worst tenth"
        )
    if (noised := noised_scores(run.metrics())) is not None:
        said += [
            f"{escaped(in_words(name).capitalize())} of the clients' models: **{mean:.3f} ± "
            f"{noised.errors[name]:.2g}** on average, where ± is the standard error due to noise"
            for name, mean in noised.means.items()
            if not lower_is_better(name)
        ]
    rounds, clients = len(run.metrics()), len(run.client_metrics())
    ran = f"{rounds} round{'s' * (rounds != 1)}{f', {clients} clients' if clients else ''}"
    lines = [". ".join([ran, *said]) + "."]
    provable = [each for each in guarantees if each.basis == "provable" and each.epsilon < inf]
    if provable:
        first = provable[0]
        proved = "; ".join(
            f"**ε = {epsilon_text(each.epsilon)}** against an adversary who sees {each.view.sees}"
            + _only_if(each)
            for each in provable
        )
        lines.append(
            f"Proved for one {first.unit.value}, at δ = {first.delta:.3g}: {proved}. Each holds "
            "under the assumptions below."
        )
    elif guarantees:
        lines.append("**No ε is proved for this run**; the reasons are below.")
    if warning := next((each.large_delta for each in provable if each.large_delta), None):
        lines.append(f"> {warning}")
    return lines


def _only_if(guarantee: Guarantee) -> str:
    lacking = [a.partition(",")[0] for a in guarantee.assumptions if NOT_PROVIDED in a]
    return f" (only with {' and '.join(lacking)}, {NOT_PROVIDED})" if lacking else ""


def _by_quality(run: RunDirectory) -> dict[str, list[float]]:
    rows = run.client_metrics()
    found = {name: [row[name] for row in rows if name in row] for name in qualities(run)}
    return {name: scores for name, scores in found.items() if scores}


def _scores(run: RunDirectory) -> list[str]:
    lines = []
    for name, scores in _by_quality(run).items():
        spread = summarize(scores, lower_is_better=lower_is_better(name))
        facts = {"mean over clients": f"{spread.mean:.4f}"}
        if name == "accuracy" and (pooled := pooled_accuracy(run)) is not None:
            facts["over all test examples"] = f"{pooled:.4f}"
        facts |= {
            "standard deviation over clients": f"{spread.std:.4f}",
            "worst tenth of clients": f"{spread.worst_decile:.4f}",
            "Jain's fairness index": f"{spread.jain_index:.4f}",
            "clients": str(len(scores)),
        }
        lines.append(table((f"{in_words(name)} of the clients' models", "value"), facts.items()))
    if (noised := noised_scores(run.metrics())) is not None:
        for name, mean in noised.means.items():
            facts = {
                "mean over clients, with noise": f"{mean:.4f}",
                "standard error due to noise": f"{noised.errors[name]:.4f}",
                "clients, with noise": f"{noised.clients:.1f}",
                "evaluated after round": str(noised.round),
            }
            title = f"{in_words(name)} of the clients' models"
            lines.append(table((title, "value"), facts.items()))
    rows = run.client_metrics()
    if few := list(reported_by_few(rows).items())[:_MOST_SHOWN]:
        counts = ", ".join(f"{escaped(name)} ({count} of {len(rows)})" for name, count in few)
        lines.append(f"Reported by half of the clients or fewer: {counts}.")
    if not lines and run.series("evaluation_messages")[0]:
        return ["No evaluation gave scores; the run's log has the reasons."]
    return lines or ["No client was evaluated."]


def _behind(run: RunDirectory) -> str | None:
    """Return a note if the scores belong to an earlier model than the last, else None."""
    noised = noised_scores(run.metrics())
    evaluated = run.series("evaluation_messages")[0] if noised is None else [noised.round]
    last = max((row["round"] for row in run.metrics()), default=0)
    if not evaluated or evaluated[-1] == last:
        return None
    return (
        f"> The scores are of the model after round {evaluated[-1]:.0f}; the run ended after "
        f"round {last:.0f}."
    )


def pooled_accuracy(run: RunDirectory) -> float | None:
    """Return the accuracy over all clients' test examples; None if their numbers are unknown."""
    rows = run.client_metrics()
    if not rows or not all({"accuracy", "num-examples"} <= set(row) for row in rows):
        return None
    total = sum(row["num-examples"] for row in rows)
    return sum(row["accuracy"] * row["num-examples"] for row in rows) / total


def _privacy(run: RunDirectory, guarantees: list[Guarantee]) -> list[str]:
    finished = run.facts["status"] in ("completed", "budget-exhausted")
    if not guarantees and (run.ledger_path.exists() or not finished):
        return [
            "**No guarantee was recorded**: the run ended before it could be written. All that "
            "clients were asked for, or that the ledger reserved, is spent nevertheless.",
            *_ledger(run),
        ]
    if not guarantees:
        return ["**No privacy is promised**: the run neither clipped nor noised, or made no round."]
    rows = [
        {
            "ε": _epsilon(g),
            "δ": f"{g.delta:.3g}",
            "basis": g.basis,
            "unit": g.unit.value,
            "relation": g.relation.value,
            "adversary sees": g.view.value,
            "accountant": g.accountant,
            "conditions": _conditions(g),
        }
        for g in guarantees
    ]
    parts = [
        table(list(rows[0]), [list(row.values()) for row in rows]),
        "Rely on the line whose adversary is yours, if its conditions and assumptions hold.",
    ]
    if not finished:
        parts.insert(0, _until(run))
    published = [g for g in guarantees if g.basis == "published"]
    if published and not all(g.conditions_hold for g in published):
        parts.append(
            "> **The published ε is a claim of the paper, not a promise of this run.** "
            "Conditions of its theorem are not met (below); the provable lines do not need them."
        )
    if (spent := _spent_beyond(run, guarantees)) is not None:
        parts.append(
            f"> **The ledger holds more than this table**: what it reserved gives ε = "
            f"{epsilon_text(spent)} against an adversary who sees the released models. The lines "
            "above may be too small, because the run was resumed, or ended between a reservation "
            "and its release."
        )
    if (lacking := _lacking(run)) > 0:
        parts.append(
            f"> **The ledger lacks {lacking} of the releases that this run made**: lines are "
            "missing, so no budget can rely on it."
        )
    for g in guarantees:
        parts.append(f"#### {g.basis.capitalize()}, {g.view.value}: {g.source}")
        items = [f"- {'✓' if c.holds else '**✗ not met**'} — {c.text}" for c in g.conditions]
        items += [f"- assumes: {text}" for text in g.assumptions]
        items += [f"- not covered: {text}" for text in g.not_covered]
        if items:
            parts.append("\n".join(items))
    parts += _ledger(run)
    return parts


def _until(run: RunDirectory) -> str:
    """Return which rounds the guarantees of an unfinished run cover."""
    failed = run.facts["status"] == "failed"
    if failed and run.facts.get("accounted"):
        return "This run failed: the guarantee covers what clients had been asked for until then."
    with_epsilon = (row for row in run.metrics() if any(n.startswith("epsilon_") for n in row))
    written = max((row["round"] for row in with_epsilon), default=0)
    return (
        f"> **This run {'failed' if failed else 'has not ended'}**: the lines below were written "
        f"after round {written:.0f}, or when the run was last resumed; they omit later rounds. "
        "To account for all rounds, resume the run, if only up to the rounds that it already has."
    )


def _lacking(run: RunDirectory) -> int:
    """Return the number of rounds that asked clients to train but are not on the ledger."""
    if not run.ledger_path.exists():
        return 0
    made = [row for row in run.metrics() if row.get("messages", 0) > 0]
    reserved = [entry for entry in run.ledger() if entry["kind"] == "reserve"]
    return len(made) - len(reserved)


def _spent_beyond(run: RunDirectory, guarantees: list[Guarantee]) -> float | None:
    """Return ε of everything on the ledger if it exceeds the stated guarantees, else None."""
    releases = Counter(
        Release.from_dict(entry["release"]) for entry in run.ledger() if entry["kind"] == "reserve"
    )
    for g in guarantees:
        if g.basis == "provable" and g.view is AdversaryView.RELEASED_MODELS and releases:
            spent = privacy_loss_of(releases, delta=g.delta).epsilon
            return spent if spent > g.epsilon * (1 + 1e-6) else None
    return None


def _ledger(run: RunDirectory) -> list[str]:
    entries = run.ledger()
    if not entries:
        return []
    kinds = Counter(entry["kind"] for entry in entries)
    short = [e for e in entries if e.get("topped_up_stddev", 0) > 0]
    after = [entry["kind"] for entry in entries[1:]] + ["nothing"]
    open_ = sum(
        entry["kind"] in ("reserve", "repeat") and then in ("reserve", "nothing")
        for entry, then in zip(entries, after, strict=True)
    )
    return [
        "### Ledger",
        table(
            ("releases reserved", "committed", "discarded", "left open", "topped up by the server"),
            [(kinds["reserve"], kinds["commit"], kinds["discard"], open_, len(short))],
        ),
        f"Every reserved release counts as spent. Last hash: `{entries[-1]['hash'][:16]}…`",
    ]


def _missing(rows: list[dict[str, Any]]) -> str:
    """Return a table of the partitions that did not answer, with the last line of each refusal."""
    said = [[refusal.strip().splitlines()[-1][:200] for refusal in row["refusals"]] for row in rows]
    return table(
        ("round", "asked to", "partitions", "reasons, where a reply came"),
        [
            (row["round"], row["kind"], ", ".join(map(str, row["partitions"])), "; ".join(why))
            for row, why in zip(rows, said, strict=True)
        ],
    )


def _rounds(run: RunDirectory) -> str:
    rows = run.metrics()
    if not rows:
        return "No round was completed."

    def total(name: str) -> float:
        return sum(row.get(name, 0) for row in rows)

    def megabytes(name: str) -> str:
        return f"{total(name) / 1e6:.2f}"

    facts = {
        "rounds": str(len(rows)),
        "that asked a client to train": str(sum(row.get("messages", 0) > 0 for row in rows)),
        "clients asked": f"{total('cohort'):.0f}",
        "answered": f"{total('answered'):.0f}",
        "refused": f"{total('refused'):.0f}",
        "discarded": f"{total('discarded'):.0f}",
        "training messages": f"{total('messages'):.0f}",
        "MB down": megabytes("bytes_down"),
        "MB up": megabytes("bytes_up"),
        "training seconds": f"{total('training_seconds'):.1f}",
        "evaluation MB down": megabytes("evaluation_bytes_down"),
        "seconds in all": f"{total('seconds'):.1f}",
    }
    return table(("of all rounds", "sum"), facts.items())


def _epsilon(guarantee: Guarantee) -> str:
    return Markup(f"**{epsilon_text(guarantee.epsilon)}**")


def _conditions(guarantee: Guarantee) -> str:
    failed = sum(not condition.holds for condition in guarantee.conditions)
    if not guarantee.conditions:
        return "see assumptions"
    return Markup(f"**✗ {failed} not met**") if failed else "✓ all met"
