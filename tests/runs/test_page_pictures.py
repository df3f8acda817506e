"""The report as a browser shows it: wide and narrow, light and dark."""

import shutil

import pytest

from flower_ext.runs import write_comparison, write_report
from tests.support.finished_runs import finished

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")

TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter(e => !e.closest("svg, .table table"))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))"""
"""JavaScript that finds elements beyond the screen; tables may, because they scroll in place."""

FOLDED_OPEN = "() => document.querySelectorAll('details').forEach(part => part.open = true)"

BRIGHTNESS = """() => {
  const colour = name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3);
  const mean = channels => channels.reduce((sum, one) => sum + Number(one), 0) / 3;
  return [mean(colour("color")), mean(colour("backgroundColor"))];
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        shown = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield shown
        shown.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return a report and a comparison of runs, one of which has a long name."""
    folder = tmp_path_factory.mktemp("runs")
    long = "a-run-with-a-name-that-nobody-would-write-" * 3
    runs = [finished(folder / name) for name in ("a", "b", long)]
    report = write_report(runs[0])
    comparison = write_comparison(runs, folder / "comparison", title="Three runs")
    return {"report": report, "comparison": comparison}


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen_and_can_be_read(browser, pages, tmp_path, name, scheme, width):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.goto(pages[name].as_uri())
    page.evaluate(FOLDED_OPEN)
    picture = page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert len(picture) > 10_000
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    text, paper = page.evaluate(BRIGHTNESS)
    assert (text < 80 and paper > 200) if scheme == "light" else (text > 180 and paper < 60)
    assert errors == []
    page.close()


def test_the_first_screen_tells_accuracy_and_what_is_proved(browser, pages):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(pages["report"].as_uri())
    seen = page.evaluate(
        """() => { const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          const words = [];
          while (walker.nextNode()) {
            const range = document.createRange(); range.selectNode(walker.currentNode);
            const box = range.getBoundingClientRect();
            if (box.height && box.top < innerHeight) words.push(walker.currentNode.data);
          }
          return words.join(" "); }"""
    )
    for word in ("0.8", "ε", "δ", "released models", "dp2-fedsam"):
        assert word in seen
    assert "claim of the paper" not in seen  # comes last
    page.close()
