"""The texts of findings, and the line of the app to which each leads."""

import ast
from pathlib import Path
from types import SimpleNamespace

import flower_ext_check
from flower_ext.files import read_toml
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.findings import Findings

PACKAGE = Path(flower_ext_check.__file__).parent
TEXTS = read_toml(PACKAGE / "findings.toml")


def test_every_text_is_of_a_finding_that_the_code_names():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.glob("faults_of_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    added = {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "add"
        and isinstance(node.args[0], ast.Constant)
    }
    assert TEXTS.keys() <= named
    assert added <= {*TEXTS, "norm_bit"}


def test_a_code_occurs_once_and_those_that_refute_come_first(tmp_path):
    (tmp_path / "client_app.py").write_text("app = ClientApp()\n\n\n@app.train()\ndef f(): ...\n")
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nserverapp = 's:app'\nclientapp = 'client_app:app'\n"
    )
    findings = Findings(app=AppFolder(tmp_path), traits=SimpleNamespace(local={}, strategies=[]))
    findings.add("failures-seen")
    findings.add("nan/upload", round=2)
    findings.add("nan/ending", ending="ends the run")
    nan, failures = findings.ordered()
    assert (nan.code, nan.text, nan.place) == ("nan", "a NaN leaves the client in round 2", "")
    assert (failures.refutes, failures.place) == (False, "client_app.py:4")
