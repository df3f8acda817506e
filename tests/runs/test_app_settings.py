"""Values that users give to settings: refused at once, by name, whatever the method reads."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.errors import InvalidValue
from flower_ext.runs.app_settings import checked_settings
from tests.support.apps import APPS, FOREIGN

REFUSED = {
    "noise-placement=servr": "noise-placement='servr': expected one of client, server",
    "method=fedavgg": "method='fedavgg': expected one of dp2-fedsam",
    "sampling-rate=2": r"sampling-rate=2.0: expected a number in \(0, 1\]",
    "colluding-share=1.5": r"colluding-share=1.5: expected a number in \[0, 1\)",
    "epsilon=0": "epsilon=0.0: expected a finite number > 0",
    "epsilon=inf": "epsilon=inf: expected a finite number > 0",
    "learning-rate=nan": "learning-rate=nan: expected a finite number",
    "rounds=0": "rounds=0: expected an integer >= 1",
    "rounds=2.5": "rounds='2.5': expected an integer",
    "seeded-noise=yes": "seeded-noise='yes': expected true or false",
    "epsilom=2": "did you mean epsilon",
}

WITHOUT_TORCH = """
import sys
from flower_ext.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, sorted({"torch", "flwr", "ray"} & set(sys.modules)))
"""


@pytest.mark.parametrize(("setting", "message"), REFUSED.items(), ids=REFUSED)
def test_an_impossible_value_is_refused_even_if_the_method_ignores_it(setting, message):
    with pytest.raises(InvalidValue, match=message):
        checked_settings(APPS / "dp2-fedsam", ["method=fedavg", setting])


def test_every_default_and_every_choice_of_our_apps_is_accepted():
    for folder in sorted(APPS.iterdir()):
        defaults, _ = checked_settings(folder, ())
        words = [f"{n}={str(v).lower() if v in (True, False) else v}" for n, v in defaults.items()]
        kept = [word for word in words if not word.startswith(("noise-multiplier=0", "epsilon=0"))]
        _, changes = checked_settings(folder, kept)
        assert changes.items() <= defaults.items()


def test_a_text_without_choices_may_be_anything():
    _, changes = checked_settings(APPS / "dp2-fedsam", ["run-directory=/out", "model=mine"])
    assert changes == {"run-directory": "/out", "model": "mine"}


def test_a_foreign_app_s_settings_may_mean_something_else():
    defaults, _ = checked_settings(FOREIGN.folder, ())
    assert "resume" not in defaults
    _, changes = checked_settings(
        FOREIGN.folder, [f"{name}=0" for name in {"rounds"} & {*defaults}]
    )
    assert set(changes.values()) <= {0}


@pytest.mark.parametrize("setting", ["sampling-rate=2", "noise-placement=servr", "epsilom=1"])
def test_a_value_is_refused_before_anything_is_written(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", str(APPS / "dp2-fedsam"), "--set", setting]
    assert CliRunner().invoke(app, words).exit_code == 2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["run", "nowhere"], marks=pytest.mark.full),
        ["run", str(APPS / "dp2-fedsam"), "--set", "sampling-rate=2"],
        pytest.param(
            ["run", str(APPS / "dp2-fedsam"), "--set", "clients=0"], marks=pytest.mark.full
        ),
        ["run", str(APPS / "dp2-fedsam"), "--resume", "nowhere"],
    ],
    ids=["app", "range", "clients", "resume"],
)
def test_a_refusal_comes_before_torch_is_imported(words, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 []", done.stdout + done.stderr
