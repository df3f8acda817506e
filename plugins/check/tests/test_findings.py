"""The texts of findings, and the line of the app to which each leads."""

import ast
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest

import flower_ext_check
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.findings import TEXTS, Case, CaseText, Findings

PACKAGE = Path(flower_ext_check.__file__).parent
NODES = [
    node
    for path in PACKAGE.glob("faults_of_*.py")
    for node in ast.walk(ast.parse(path.read_text()))
]


def test_every_case_is_looked_for():
    named = {
        node.attr
        for node in NODES
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Case"
    }
    assert named == set(Case.__members__)


def test_each_finding_gives_every_value_of_its_text():
    added = {
        Case[node.args[0].attr]: {keyword.arg for keyword in node.keywords}
        for node in NODES
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "findings.add"
        and isinstance(node.args[0], ast.Attribute)
    }
    assert len(added) >= 30
    for case, given in added.items():
        texts = TEXTS[case].text + TEXTS[case].remedy
        assert {name for _, name, *_ in Formatter().parse(texts) if name} == given - {"refutes"}


def test_texts_and_cases_that_lack_each_other_are_refused(tmp_path):
    text = (PACKAGE / "findings.toml").read_text()
    file = tmp_path / "findings.toml"
    file.write_text(text)
    assert CaseText.read_all(file) == TEXTS
    for changed in (text + "[another]\ntext = ''\nremedy = ''\n", text.partition("[zero]")[0]):
        file.write_text(changed)
        with pytest.raises(ValueError, match="differ in"):
            CaseText.read_all(file)


def test_a_code_occurs_once_and_those_that_refute_come_first(tmp_path):
    (tmp_path / "client_app.py").write_text("app = ClientApp()\n\n\n@app.train()\ndef f(): ...\n")
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nserverapp = 's:app'\nclientapp = 'client_app:app'\n"
    )
    findings = Findings(
        app=AppFolder(tmp_path), traits=SimpleNamespace(local_mod={}, strategies=[])
    )
    findings.add(Case.FAILURES_SEEN)
    findings.add(Case.NAN_UPLOAD, round=2)
    findings.add(Case.NAN_ENDING, ending="ends the run")
    nan, failures = findings.ordered()
    assert (nan.code, nan.text, nan.place) == ("nan", "a NaN leaves the client in round 2", "")
    assert (failures.refutes, failures.place) == (False, "client_app.py:4")
