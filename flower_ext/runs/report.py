"""The report of a run: ``report.md``, and ``report.html`` with the figures inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from flower_ext.evaluation import summarize
from flower_ext.privacy import AdversaryView, Guarantee, Release, epsilon_text, privacy_loss_of
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.figures import draw_figures, in_words, qualities
from flower_ext.runs.files import write_whole
from flower_ext.runs.scores import lower_is_better

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.92em; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
blockquote { margin: 1rem 0; padding: 0.1rem 1rem; border-left: 4px solid #D55E00;
  background: #fdf3ec; }
code { background: #f4f4f4; padding: 0.1em 0.3em; }
"""


def write_report(run: RunDirectory) -> Path:
    """Write ``report.md`` and ``report.html`` into the run directory; returns the HTML's path."""
    figures = draw_figures(run, run.path / "figures")
    return write_page(run.path, "report", "\n\n".join(_sections(run, figures)), title=_title(run))


def write_page(folder: Path, name: str, text: str, *, title: str) -> Path:
    """Write a report as Markdown and as HTML; returns the HTML's path."""
    write_whole(folder / f"{name}.md", (text + "\n").encode(), sync=False)
    path = folder / f"{name}.html"
    write_whole(path, to_html(text, title=title, folder=folder).encode(), sync=False)
    return path


def to_html(text: str, *, title: str, folder: Path) -> str:
    """A Markdown report as one HTML page: no markup passes, SVG figures are put inside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def inline(match: re.Match[str]) -> str:
        svg = (folder / match["source"]).read_text(encoding="utf-8")
        return f"<figure>{svg[svg.index('<svg') :]}</figure>"

    body = re.sub(r'<p><img src="(?P<source>figures/[\w-]+\.svg)"[^>]*></p>', inline, body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


class Markup(str):
    """Text that is Markdown, and stays so in a `table`."""


def escaped(text: str) -> str:
    """Text as Markdown that shows it, and no link, image, emphasis or markup in it."""
    return re.sub(r"([\\`*\[\]<&])", r"\\\1", text)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; what is in it is shown as it is, but for `Markup`."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _title(run: RunDirectory) -> str:
    config = run.config
    return f"{config.get('method', 'Run')} on {config.get('dataset', 'unknown data')}"


def _sections(run: RunDirectory, figures: dict[str, str]) -> list[str]:
    guarantees = run.guarantees()
    sections = [f"# {_title(run)}", *_outcome(run), "## Privacy", *_privacy(run, guarantees)]
    if figures:
        sections.append("## Figures")
        sections += [f"![{escaped(title)}](figures/{file})" for file, title in figures.items()]
        sections.append("The numbers of each figure are in `figures/`, as CSV.")
    sections += ["## Rounds", _rounds(run)]
    if missing := run.missing():
        sections += ["## Missing answers", _missing(missing)]
    sections += ["## Configuration", table(("setting", "value"), sorted(run.config.items()))]
    sections += ["## Versions", table(("package", "version"), run.facts["versions"].items())]
    return sections


def _outcome(run: RunDirectory) -> list[str]:
    facts = run.facts
    lines = []
    if facts["status"] != "completed":
        reason = f": {escaped(facts['reason'])}" if facts.get("reason") else ""
        if facts["status"] == "running":
            reason = ", or was ended before it could say so"
        lines.append(f"> **This run is {facts['status']}**{reason}")
    if later := [str(start["after_round"]) for start in facts.get("starts", [])[1:]]:
        lines.append(f"Resumed after round {', '.join(later)}.")
    if behind := _behind(run):
        lines.append(behind)
    for name in qualities(run):
        scores = [row[name] for row in run.client_metrics() if name in row]
        if not scores:
            continue
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
    return lines


def _behind(run: RunDirectory) -> str | None:
    """That the scores are of an earlier model than the last, where they are."""
    evaluated, _ = run.series("evaluation_messages")
    last = max((row["round"] for row in run.metrics()), default=0)
    if not evaluated or evaluated[-1] == last:
        return None
    return (
        f"> The scores below are of the model after round {evaluated[-1]:.0f}; the run ended after "
        f"round {last:.0f}."
    )


def pooled_accuracy(run: RunDirectory) -> float | None:
    """Accuracy over all test examples of all clients, where their numbers are known."""
    rows = run.client_metrics()
    if not rows or not all({"accuracy", "num-examples"} <= set(row) for row in rows):
        return None
    total = sum(row["num-examples"] for row in rows)
    return sum(row["accuracy"] * row["num-examples"] for row in rows) / total


def _privacy(run: RunDirectory, guarantees: list[Guarantee]) -> list[str]:
    finished = run.facts["status"] in ("completed", "budget-exhausted")
    if not guarantees and (run.ledger_path.exists() or not finished):
        return [
            "**No guarantee was recorded**: the run has not come to where it is written. What "
            "clients were asked for, or the ledger reserved, is spent all the same.",
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
        "Sign the line whose adversary is yours, and only if its conditions and assumptions hold.",
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
            f"> **The ledger holds more than this table**: what it reserved makes ε = "
            f"{epsilon_text(spent)} for who sees released models. The lines above may be too "
            "small: the run was resumed, or ended between a reservation and its release."
        )
    if (lacking := _lacking(run)) > 0:
        parts.append(
            f"> **The ledger lacks {lacking} of the releases that this run made**: lines are "
            "missing, so that no budget can rest on it."
        )
    for g in guarantees:
        parts.append(f"### {g.basis.capitalize()}, {g.view.value}: {g.source}")
        items = [f"- {'✓' if c.holds else '**✗ not met**'} — {c.text}" for c in g.conditions]
        items += [f"- assumes: {text}" for text in g.assumptions]
        items += [f"- not covered: {text}" for text in g.not_covered]
        if items:
            parts.append("\n".join(items))
    parts += _ledger(run)
    return parts


def _until(run: RunDirectory) -> str:
    """What the guarantees of a run that did not come to its end speak of."""
    failed = run.facts["status"] == "failed"
    if failed and run.facts.get("accounted"):
        return "This run failed: the guarantee covers what clients had been asked for until then."
    with_epsilon = (row for row in run.metrics() if any(n.startswith("epsilon_") for n in row))
    written = max((row["round"] for row in with_epsilon), default=0)
    return (
        f"> **This run {'failed' if failed else 'has no end yet'}**: the lines below were written "
        f"after round {written:.0f}, or when it was last resumed; later rounds are in none. "
        "Resume the run, if only up to the rounds that it has, to account for all."
    )


def _lacking(run: RunDirectory) -> int:
    """How many rounds that asked clients to train are not on the ledger, where there is one."""
    if not run.ledger_path.exists():
        return 0
    made = [row for row in run.metrics() if row.get("messages", 0) > 0]
    reserved = [entry for entry in run.ledger() if entry["kind"] == "reserve"]
    return len(made) - len(reserved)


def _spent_beyond(run: RunDirectory, guarantees: list[Guarantee]) -> float | None:
    """ε of everything on the ledger, where that is more than the guarantees state."""
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
    """Which partitions were asked in vain, and the last line of what was refused."""
    said = [[refusal.strip().splitlines()[-1][:200] for refusal in row["refusals"]] for row in rows]
    return table(
        ("round", "asked to", "partitions", "why, where anything came"),
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


def _cell(value: object) -> str:
    text = value if isinstance(value, Markup) else escaped(str(value))
    return " ".join(text.replace("|", "\\|").splitlines())
