"""Common mistakes in commands: the command ends at once, and one line says what to change."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app as cli
from flower_ext.runs import RunDirectory
from tests.support.apps import APPS

BYTES = 20_000
"""Size limit of a file, which stands for a nearly full disk."""
FLOWER_EXT = "import sys; from flower_ext.cli.main import main; sys.exit(main())"
MISTAKES = {
    "more clients than examples": ("dp2-fedsam", "clients=5000", "change the setting clients"),
    "no clients": ("dp2-fedsam", "clients=0", "clients=0: expected an integer >= 1"),
    "no silos": ("uldp-fl", "num-silos=0", "num-silos=0: expected an integer >= 1"),
    "too few silos": ("consortium", "num-silos=2", "expected at least 3, the fewest members"),
    "no rounds": ("dp2-fedsam", "rounds=0", "rounds=0: expected an integer >= 1"),
    "no such data set": ("dp2-fedsam", "dataset=minst", "expected one of digits, mnist"),
    "no such model": ("dp2-fedsam", "model=resnet", "expected one of digits-mlp"),
    "data that are nowhere": (
        "dp2-fedsam",
        "dataset=mnist",
        "expected a folder with the data set",
    ),
    "negative epsilon": ("dp2-fedsam", "epsilon=-1", "epsilon=-1.0: expected a finite number > 0"),
    "no number": ("dp2-fedsam", "clipping-norm=nan", "clipping-norm=nan: expected a finite number"),
    "text for a number": ("dp2-fedsam", "rounds=many", "rounds='many': expected an integer"),
    "neither true nor false": ("dp2-fedsam", "seeded-noise=maybe", "expected true or false"),
    "misspelt setting": ("dp2-fedsam", "epsilom=2", "did you mean epsilon"),
    "misspelt word": ("dp2-fedsam", "sampling=poison", "expected one of poisson, fixed-size"),
    "misspelt optimizer": ("dp2-fedsam", "optimizer=Adm", "Adam, AdamW"),
    "empty batches": ("dp2-fedsam", "batch-size=0", "batch-size=0: expected an integer >= 1"),
    "too many records": ("dp-ditto", "examples-per-client=5000", "training examples of client 0"),
    "a rival without noised steps": ("dp-ditto", "method=dp-fedala", "noise='upload'"),
    "no group": ("uldp-fl", "method=uldp-group group-size=zero", "a whole number, max or median"),
    "a loss beyond the theorem": (
        "upcycled-fl",
        "perturbation=objective unit-features=false",
        "curvature is bounded",
    ),
    "a method without a minimum": ("upcycled-fl", "method=scaffold", "expected 'sgd'"),
    "texts that are nowhere": ("private-finetuning", "dataset=text", "text-file=''"),
    "a run that is nowhere": ("dp2-fedsam", "run-directory=/proc/x", "/proc/x cannot be made"),
}


@pytest.mark.full
@pytest.mark.parametrize(("app", "settings", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_setting_ends_the_run_with_one_line(
    app, settings, message, tmp_path, offline, monkeypatch
):
    """A mistake that the command itself finds starts no process."""
    monkeypatch.chdir(tmp_path)
    changes = [word for setting in settings.split() for word in ("--set", setting)]
    done = CliRunner().invoke(cli, ["run", str(APPS / app), "--in-process", *changes])
    assert isinstance(done.exception, SystemExit), done.output
    assert done.exit_code in (1, 2), done.output  # 2: refused before the run
    output = " ".join(done.stderr.replace("│", " ").split())  # the box around an error breaks lines
    assert message in output
    assert "Traceback" not in output
    assert len(done.stderr.splitlines()) <= 8


@pytest.mark.full
def test_a_full_disk_gives_one_line_and_the_run_resumes_with_room(tmp_path):
    path = tmp_path / "run"
    start = [
        "--in-process",
        "--clients",
        "12",
        "--set",
        "evaluate-every=0",
        "--set",
        f"run-directory={path}",
    ]
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({BYTES}, {BYTES}))\n"

    def ended(program: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, "run", APPS / "dp2-fedsam", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    failed = ended(full + FLOWER_EXT, *start)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "is full (" in failed.stderr
    assert "free some space, then resume" in failed.stderr
    assert "Traceback" not in failed.stderr
    done = ended(FLOWER_EXT, "--in-process", "--resume", path, "--set", "rounds=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert RunDirectory.open(path).status == "completed"


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["run", str(APPS / "demo"), "--settings", "a.toml", "--settings", "b.toml"], True),
        (["link", "key", "a.key", "--help"], False),
        (["run", "nowhere", "--set", "a=1", "--set", "b=2", "--in-process", "--in-process"], False),
    ],
    ids=["a file of settings", "no option", "a list"],
)
def test_an_option_that_would_silently_replace_the_first_is_refused(words, is_refused):
    done = CliRunner().invoke(cli, words, env={"COLUMNS": "200"})
    assert ("given twice" in done.output) == is_refused
    assert not is_refused or (done.exit_code == 2 and "--settings" in done.output)
