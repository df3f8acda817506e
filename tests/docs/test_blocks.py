"""Every block of Python in README, guides and pages on methods runs, in the order of its page."""

import io
import itertools
import re
import shlex
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from flower_ext.cli import main as cli
from flower_ext.runs.app_settings import declared_settings
from tests.support.pages import ROOT, Block, blocks, commands, is_full, pages

RUN = ("python", "setup", "check")
ELSEWHERE = {
    "docs/audit.md": "plugins/audit/tests/test_audit_command.py runs it as a file",
}
WITH_BLOCKS = [
    pytest.param(page, marks=[pytest.mark.full] if is_full(page) else [], id=str(name))
    for page in pages()
    for name in [page.relative_to(ROOT)]
    if str(name) not in ELSEWHERE and any(block.kind == "python" for block in blocks(page))
]


def run(block: Block, namespace: dict[str, object]) -> None:
    """Run a block as if it were the file of its page, so that a traceback names the line."""
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, str(block.page), "exec"), namespace)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_a_pages_blocks_run_in_order_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    namespace = vars(module)
    printed = io.StringIO()
    for block in blocks(page):
        if block.kind == "output":
            lines = printed.getvalue().splitlines(keepends=True)
            kept = "".join(x for x in lines if not x.startswith("Report: "))
            assert kept == block.code, block.name
        if block.kind in RUN and not block.skipped:
            if block.kind == "python":
                printed = io.StringIO()
            with redirect_stdout(printed):
                run(block, namespace)


def test_most_pages_with_code_are_run():
    assert len(WITH_BLOCKS) > 15


SHELL = ("", "bash", "sh", "console")
EVERY = [
    (block, command)
    for page in pages()
    for block in blocks(page)
    if block.kind in SHELL
    for command in commands(block)
]
# The project files with extras that pages install, each with the words before an extra.
EXTRAS = {
    "pyproject.toml": r"(?:flower-ext|'\.|\.whl)",
    "plugins/pretrained/pyproject.toml": r"(?:flower-ext-|\./plugins/)pretrained",
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def of(*beginnings: str) -> list[tuple[Block, list[str]]]:
    """Those that begin so, in words, without variables before them."""
    bare = [(block, re.sub(r"^([A-Z_]+=\S+\s+)+", "", command)) for block, command in EVERY]
    return [(block, shlex.split(c)) for block, c in bare if c.split(" ")[0].endswith(beginnings)]


def test_every_command_on_a_page_exists_with_its_options():
    known_commands = of("flower-ext")
    modules = cli.command_modules()
    assert len(known_commands) > 40
    for block, (_, name, *words) in known_commands:
        assert name in modules, block.name
        command = cli.load_command(name, modules[name])
        if steps := getattr(command, "commands", None):
            command = steps[words[0]]
        known = {option for p in command.params for option in p.opts}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known | {"--help"}, block.name


def test_every_setting_on_a_command_line_is_one_of_its_app():
    seen = 0
    for block, (_, _, *words) in of("flower-ext"):
        folder = next((w for w in words if w.startswith("apps/")), None)
        given = [w for before, w in itertools.pairwise(words) if before == "--set"]
        if folder is None or not given:
            continue
        assert (ROOT / folder).is_dir(), block.name
        known = {
            *declared_settings(ROOT / folder)[0],
            "run-directory",
            "resume",
            "state-folder",
        }
        assert {setting.partition("=")[0] for setting in given} <= known, block.name
        seen += len(given)
    assert seen > 30


def test_every_target_of_make_that_a_page_names_is_one():
    named = [(block, word) for block, words in of("make") for word in words[1:] if "=" not in word]
    assert {word for _, word in named} >= {"demo", "test", "docs"}
    assert [(block.name, word) for block, word in named if word not in TARGETS] == []


@pytest.mark.parametrize("project", EXTRAS)
def test_every_extra_that_a_page_installs_is_one(project):
    text = "\n".join(page.read_text() for page in pages())
    lists = re.findall(rf"{EXTRAS[project]}\[([a-z,]+)\]", text)
    named = {extra for extras in lists for extra in extras.split(",")}
    known = tomllib.loads((ROOT / project).read_text())["project"]["optional-dependencies"]
    assert named <= set(known)
    assert len(named) > 1


# The source distribution has no benchmarks.
FOLDERS = tuple(name for name in ("benchmarks", "flower_ext", "tests") if (ROOT / name).is_dir())


def test_every_module_of_ours_that_a_page_runs_is_there():
    for block, words in of("python"):
        if words[1:2] == ["-m"] and words[2].startswith(FOLDERS):
            folder = ROOT / "plugins/kernels" if words[2] == "flower_ext_kernels" else ROOT
            path = folder / Path(*words[2].split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), block.name
