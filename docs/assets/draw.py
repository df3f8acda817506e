"""Draw the figures of the site: ``python docs/assets/draw.py`` writes the SVG files beside it.

Every figure is a few boxes and arrows with words. A figure keeps a light ground, so that it reads
the same on a light and on a dark page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, LINE, FAINT = "#1c1f26", "#5b6472", "#8b93a1"
BLUE, GREEN, AMBER, RED, GREY = "#e3ecfb", "#e0f3e6", "#fdf0d5", "#fbe3e0", "#f1f3f6"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Drawing:
    """An SVG that grows by boxes, arrows and words; lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts: list[str] = []
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{FONT}">\n'
            f"<title>{escape(title)}</title>\n"
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{LINE}"/></marker></defs>\n'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        bold: bool = False,
        colour: str = INK,
        anchor: str = "middle",
    ) -> None:
        """Write lines of text, the first at ``y``."""
        for number, line in enumerate(text.split("\n")):
            weight = ' font-weight="600"' if bold and number == 0 else ""
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * (size + 4):g}" font-size="{size}" '
                f'text-anchor="{anchor}" fill="{colour}"{weight}>{escape(line)}</text>'
            )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        *,
        fill: str = GREY,
        size: int = 13,
        bold: bool = True,
        top: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draw a box with its text in the middle, or at its top."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" '
            f'stroke="{LINE}" stroke-width="1"{dash}/>'
        )
        if text:
            lines = text.count("\n") + 1
            middle = y + h / 2 - (lines - 1) * (size + 4) / 2 + size * 0.36
            self.words(x + w / 2, y + size + 7 if top else middle, text, size=size, bold=bold)

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        text: str = "",
        *,
        dashed: bool = False,
        size: int = 12,
        dx: float = 0,
        dy: float = -7,
        both: bool = False,
    ) -> None:
        """Draw an arrow, with words near its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{LINE}" stroke-width="1.4" '
            f'fill="none" marker-end="url(#tip)"{start}{dash}/>'
        )
        if text:
            self.words((x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, text, size=size, colour=LINE)

    def svg(self) -> str:
        """Return the file."""
        return self.head + "\n".join(self.parts) + "\n</svg>\n"


def blocks() -> Drawing:
    """Five building blocks and how they meet."""
    d = Drawing(860, 300, "Task, strategy, plan, engine and guarantee")
    d.box(20, 30, 200, 92, "Task\nyour model, loss\nand data", fill=GREEN)
    d.box(330, 30, 200, 92, "Strategy\nthe method: what clients\ntrain, what is shared", fill=BLUE)
    d.box(640, 30, 200, 92, "Guarantee\nwho is protected from\nwhom, with which ε", fill=AMBER)
    d.box(330, 178, 200, 92, "Plan\nwho is asked, clipping,\nnoise, accounting", fill=RED)
    d.box(20, 178, 200, 92, "Engine\none process, Ray,\nSuperLink", fill=GREY)
    d.arrow(222, 76, 327, 76, "client_app")
    d.arrow(430, 176, 430, 125, "plan=", dx=26, dy=4)
    d.arrow(532, 76, 637, 76, "guarantees()")
    d.arrow(222, 224, 268, 224)
    d.parts[-1] = d.parts[-1].replace("L268 224", "L275 224 L275 100 L327 100")
    d.words(284, 166, "runs both", size=12, colour=LINE, anchor="start")
    d.arrow(532, 224, 640, 224)
    d.parts[-1] = d.parts[-1].replace("L640 224", "L740 224 L740 125")
    d.words(748, 190, "what was done", size=12, colour=LINE, anchor="start")
    return d


def one_round() -> Drawing:
    """One private round, as the README shows it."""
    d = Drawing(860, 330, "One private round of federated learning")
    d.box(20, 20, 250, 290, "Clients", fill="#fafbfc", top=True)
    for number, y in enumerate((55, 138, 221)):
        d.box(36, y, 218, 72, "", fill=GREEN)
        d.words(145, y + 20, f"client {number}" if number < 2 else "client N", bold=True)
        d.words(145, y + 39, "trains the shared part", size=12)
        d.words(145, y + 56, "keeps its personal part", size=12)
    d.box(
        345,
        92,
        150,
        146,
        "Plan\ndraws a cohort\nclips to C\nadds noise σC\ncounts every spend",
        fill=RED,
    )
    d.box(
        570,
        20,
        270,
        120,
        "Server\nyour strategy: Flower's,\nor a method of this package",
        fill=BLUE,
    )
    d.box(
        570,
        190,
        270,
        120,
        "Run directory\nmodel, report, ledger,\nε with unit, adversary and δ",
        fill=AMBER,
    )
    d.arrow(272, 165, 342, 165, "updates", dy=-8)
    d.arrow(497, 130, 567, 85, "one noised sum", dx=-40, dy=-14)
    d.arrow(567, 50, 272, 50, "shared model", dx=-8)
    d.arrow(705, 142, 705, 187)
    d.arrow(497, 215, 567, 245)
    return d


def choose() -> Drawing:
    """Draw the decision tree of choose.md."""
    d = Drawing(1000, 800, "Which method: questions from left to right")
    d.box(14, 355, 150, 76, "Whom must\nthe training\nhide?", fill=AMBER)

    def branch(y: float, text: str, label_y: float) -> None:
        d.arrow(166, 393, 216, y)
        d.box(218, y - 34, 200, 68, text, fill=GREY)

    branch(60, "nobody: I only want\nfewer messages or\nbetter personal models", 0)
    branch(260, "a client with all its\nrecords (a phone, a firm)", 0)
    branch(500, "a person with records\nin several silos", 0)
    branch(690, "one record, from a server\nthat sees every upload", 0)

    def leaf(y: float, text: str, fill: str = BLUE) -> None:
        d.box(742, y - 27, 244, 54, text, fill=fill)

    def ask(y: float, origin: float, text: str) -> None:
        d.arrow(420, origin, 476, y)
        d.box(478, y - 27, 206, 54, text, fill="#fafbfc", bold=False)
        d.arrow(686, y, 739, y)

    ask(36, 60, "halve training and messages")
    leaf(36, "Upcycled(your strategy)\nNonPrivatePlan, or the base's plan")
    ask(104, 60, "a model for each client,\nwithout privacy")
    leaf(104, "DPDitto and its baselines\nNonPrivatePlan")
    ask(180, 260, "one model for all,\nClientApp stays as it is")
    leaf(180, "DPFedAvg\nReleasePlan, noise by the server")
    ask(248, 260, "a personal head on a\nshared extractor")
    leaf(248, "DP2FedSAM or Centaur\nReleasePlan")
    ask(316, 260, "the server must not see\nsingle uploads")
    leaf(316, "the same two, and\nnoise_placement=SecureSum()")
    ask(384, 260, "pretrained model, few\nrecords a client")
    leaf(384, "DPFedAvg on a frozen base\nTask(trainable=), ReleasePlan")
    ask(466, 500, "the server must learn\nnothing about single users")
    leaf(466, "UldpAvg, equal weights\nReleasePlan, population: users")
    ask(534, 500, "weights by records, and\nnobody learns the counts")
    leaf(534, "UldpAvg, weighted_sum\nReleasePlan, population: users")
    ask(622, 690, "personal models,\nclients unlike each other")
    leaf(622, "DPDitto\nRecordLevelPlan(steps=)")
    ask(690, 690, "small convex model,\nexact minimiser")
    leaf(690, "Hosted(FedProx), upcycled\nPerturbationPlan")
    ask(758, 690, "first measure: does training\nalone do as well?")
    leaf(758, "DPDitto, λ = 0, local epochs = 0\nshares nothing, spends nothing", GREEN)
    return d


def dp_fedavg() -> Drawing:
    """DP-FedAvg: one model for all."""
    d = Drawing(760, 190, "DP-FedAvg: one model, clipped updates, one noised sum")
    d.box(20, 24, 170, 60, "client: SGD or SAM", fill=GREEN)
    d.box(20, 106, 170, 60, "client: SGD or SAM", fill=GREEN)
    d.box(
        300, 50, 180, 90, "Σ clip(update, C)\n+ N(0, σ²C²)\n÷ expected cohort", fill=RED, bold=False
    )
    d.box(590, 62, 150, 66, "one shared\nmodel", fill=BLUE)
    d.arrow(192, 54, 297, 82, "update", dy=-10)
    d.arrow(192, 136, 297, 108, "update", dy=22)
    d.arrow(482, 95, 587, 95, "mean")
    return d


def dp2_fedsam() -> Drawing:
    """DP²-FedSAM: the head stays."""
    d = Drawing(760, 230, "DP²-FedSAM: the extractor is shared, the head stays on the client")
    for y, name in ((22, "client A"), (126, "client B")):
        d.box(20, y, 330, 82, "", fill=GREEN)
        d.words(60, y + 46, name, bold=True, size=12)
        d.box(108, y + 14, 108, 54, "head\nstays here", fill="#ffffff", size=12)
        d.box(228, y + 14, 110, 54, "extractor\nby SAM", fill=BLUE, size=12)
    d.box(440, 72, 120, 82, "clip, noise,\naverage", fill=RED)
    d.box(630, 78, 112, 70, "shared\nextractor", fill=BLUE)
    d.arrow(352, 63, 437, 100)
    d.arrow(352, 167, 437, 128)
    d.arrow(562, 113, 627, 113)
    return d


def uldp() -> Drawing:
    """ULDP-AVG: every user's own update is clipped in every silo."""
    d = Drawing(760, 240, "ULDP-AVG: each user is clipped and weighted in each silo")
    for y, name in ((20, "silo 1"), (128, "silo 2")):
        d.box(20, y, 400, 92, "", fill=GREEN)
        d.words(52, y + 50, name, bold=True)
        for number, x in enumerate((90, 198, 306)):
            user = ("Ada", "Ben", "Cem")[number]
            d.box(x, y + 16, 100, 60, f"{user}\nw · clip(Δ, C)", fill="#ffffff", size=12)
    d.box(500, 76, 110, 88, "sum of silos\n+ noise σC", fill=RED)
    d.box(660, 84, 84, 72, "model", fill=BLUE)
    d.arrow(422, 66, 497, 104)
    d.arrow(422, 174, 497, 136)
    d.arrow(612, 120, 657, 120)
    return d


def private_weighting() -> Drawing:
    """Private weighting: counts under blinds and encryption."""
    d = Drawing(
        760, 210, "Private weighting: the server decrypts the noised sum of all silos alone"
    )
    d.box(20, 20, 200, 74, "silo 1\ncounts n₁ᵤ stay here", fill=GREEN)
    d.box(20, 116, 200, 74, "silo 2\ncounts n₂ᵤ stay here", fill=GREEN)
    d.box(
        520,
        56,
        220,
        98,
        "server\nholds the key, sees blinded\ntotals and one noised sum",
        fill=BLUE,
    )
    d.arrow(517, 76, 223, 50, "Enc(1/Nᵤ), blinded", dy=-10)
    d.arrow(223, 152, 517, 134, "Enc(Σ nₛᵤ/Nᵤ · clip(Δ) + noise), masked", dy=24)
    return d


def dp_ditto() -> Drawing:
    """DP-Ditto: a local model that is uploaded, a personal one that stays."""
    d = Drawing(760, 210, "DP-Ditto: a noised local model leaves, a personal model stays")
    d.box(20, 16, 430, 178, "", fill=GREEN)
    d.words(60, 108, "client", bold=True)
    d.box(110, 32, 150, 62, "local model\nnoise in each step", fill="#ffffff", size=12)
    d.box(110, 116, 150, 62, "personal model\nstays here", fill="#ffffff", size=12)
    d.box(310, 116, 120, 62, "(1−λ/2) own loss\n+ λ/2 distance", fill=AMBER, size=12, bold=False)
    d.box(590, 66, 150, 76, "shared model\nmean of uploads", fill=BLUE)
    d.arrow(262, 62, 587, 88, "upload, clipped", dx=95, dy=-10)
    d.arrow(308, 147, 263, 147)
    d.arrow(587, 122, 433, 147, "pull", dy=18)
    return d


def upcycled() -> Drawing:
    """Upcycled: even rounds ask nobody."""
    d = Drawing(760, 190, "Upcycled: odd rounds train, even rounds move on along the last step")
    for number, x in enumerate((20, 206, 392, 578)):
        odd = number % 2 == 0
        text = "clients train" if odd else "nobody is asked"
        d.box(
            x,
            26,
            160,
            76,
            f"round {number + 1}\n{text}",
            fill=GREEN if odd else GREY,
            dashed=not odd,
        )
        if number < 3:
            d.arrow(x + 162, 64, x + 184, 64)
    d.words(380, 138, "even round:  w ← w + c · (w − w before the last training round)", size=14)
    d.words(380, 164, "no message, no data touched, no privacy spent", size=12, colour=LINE)
    return d


def baselines() -> Drawing:
    """Draw what the server sends in each baseline."""
    d = Drawing(760, 284, "What the server sends and what stays, by method")
    rows = [
        ("pFedMe, FedALA", "one shared model", "the client's own model"),
        ("FedAMP", "a mix made for this client", "the client's own model"),
        ("APPLE", "all core models", "own model, how it mixes"),
        ("SCAFFOLD", "one shared model, one control", "the client's control"),
        ("FedDyn", "one shared model", "the client's last gradient"),
    ]
    d.words(110, 28, "method", bold=True)
    d.words(360, 28, "server sends", bold=True)
    d.words(630, 28, "stays on the client", bold=True)
    for number, (name, sent, kept) in enumerate(rows):
        y = 42 + number * 47
        d.box(20, y, 180, 38, name, fill=BLUE)
        d.box(240, y, 240, 38, sent, fill=GREY, bold=False, size=12)
        d.box(520, y, 220, 38, kept, fill=GREEN, bold=False, size=12)
        d.arrow(202, y + 19, 237, y + 19)
        d.arrow(482, y + 19, 517, y + 19)
    return d


def packages() -> Drawing:
    """Draw the packages of flower_ext, each on those that it may import."""
    d = Drawing(860, 468, "The packages of flower_ext: each imports only those below it")

    def package(x: float, y: float, w: float, name: str, text: str, fill: str) -> None:
        d.box(x, y, w, 46, "", fill=fill)
        d.words(x + 14, y + 28, name, bold=True, anchor="start")
        d.words(x + 128, y + 28, text, anchor="start", size=12)

    full = 820
    package(
        20,
        16,
        full,
        "cli",
        "flower-ext: one module a command, the launcher, a deployment on this machine",
        BLUE,
    )
    package(
        20,
        68,
        full,
        "algorithms",
        "one module a method: strategy and client side next to each other",
        BLUE,
    )
    package(
        20,
        120,
        full,
        "federation",
        "what every method shares: rounds, cohorts, checks, spending, client side, engines, state",
        BLUE,
    )
    d.parts.append(
        f'<path d="M20 178 L840 178" stroke="{INK}" stroke-width="1.5" stroke-dasharray="7 5"/>'
    )
    d.words(430, 195, "nothing below this line imports flwr", size=12, colour=LINE)
    package(
        20,
        206,
        full,
        "runs",
        "run directory, report, comparison, figures and callbacks",
        GREEN,
    )
    package(20, 258, full, "metrics", "metrics of models, and their spread over clients", GREEN)
    package(20, 310, full, "training", "Task, SGD and SAM, batches, DP-SGD", GREEN)
    package(20, 362, 405, "data", "data sets and partitions", GREEN)
    package(435, 362, 405, "secure", "secure sums, private weights (no torch)", AMBER)
    package(
        20,
        414,
        full,
        "privacy",
        "plans, bounds, noise, accounting, guarantees, ledger, theorems (no torch)",
        AMBER,
    )
    return d


FIGURES = {
    "blocks": blocks,
    "round": one_round,
    "choose": choose,
    "dp-fedavg": dp_fedavg,
    "dp2-fedsam": dp2_fedsam,
    "uldp": uldp,
    "private-weighting": private_weighting,
    "dp-ditto": dp_ditto,
    "upcycled": upcycled,
    "baselines": baselines,
    "packages": packages,
}
"""Figures by the names of their files."""

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
