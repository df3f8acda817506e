"""The guard says at its start what a reply costs, and refuses a budget that pays for none."""

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from guarding import write_policy, write_sum_policy

from flower_ext.errors import InvalidValue
from flower_ext.privacy import privacy_loss_of
from flower_ext_guard import command, hostile_app
from flower_ext_guard.app_process import check_hidden, check_isolation, packages_in
from flower_ext_guard.command import costs, uncovered
from flower_ext_guard.policy import read_policy
from tests.support.identities import write_identities

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_command_and_the_audit_are_registered_in_the_cores_groups():
    groups = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    parts = {
        "flower_ext.commands": command.guard,
        "flower_ext.experiments": hostile_app.guard_experiment,
    }
    assert groups.keys() == parts.keys()
    for group, part in parts.items():
        ((name, value),) = groups[group].items()
        assert name == "guard"
        assert EntryPoint(name=name, value=value, group=group).load() is part


def test_the_budget_pays_for_as_many_replies_as_the_guard_says(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml"))
    (line,) = costs(policy)
    paid = int(re.search(r"pays for (\d+) replies", line)[1])
    spend = policy.messages["train"].spend()
    spent, more = (privacy_loss_of({spend: n}, delta=1e-6).epsilon for n in (paid, paid + 1))
    assert spent <= policy.budget.epsilon < more


def test_a_budget_that_pays_for_no_reply_is_refused(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml", epsilon=20))
    with pytest.raises(InvalidValue, match=r"one reply costs ε = 26\.4"):
        costs(policy)


def test_a_secret_that_others_may_read_is_named(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml"))
    secret = tmp_path / "guard.secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o600)
    assert not any("guard.secret" in line for line in uncovered(policy, secret))
    secret.chmod(0o640)
    assert any("guard.secret (chmod 600)" in line for line in uncovered(policy, secret))


@pytest.mark.parametrize("name", ["policy", "ledger", "secret"])
def test_apps_never_read_the_files_of_the_guard(tmp_path, name):
    (data := tmp_path / "data").mkdir()
    at = {other: tmp_path / other for other in ("policy", "ledger", "secret")}
    at[name] = data / name
    link = tmp_path / "link"
    link.symlink_to(data)
    more = f'readable = ["{link}"]\nledger = "{at["ledger"]}"\n'
    policy = read_policy(write_policy(at["policy"], isolation="none", more=more))
    checks = {"secret": lambda: check_hidden(policy, "secret", at["secret"])}
    with pytest.raises(InvalidValue, match=f"holds the guard's {name}"):
        checks.get(name, lambda: check_isolation(policy))()


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
def test_apps_never_read_the_key_by_which_a_site_signs(tmp_path, isolation):
    (data := tmp_path / "data").mkdir()
    identity = write_identities(data, 3)[0]
    path = write_sum_policy(tmp_path / "guard.toml", identity, isolation=isolation)
    path.write_text(f'readable = ["{data}"]\n{path.read_text()}')
    with pytest.raises(InvalidValue, match="holds the guard's identity key"):
        check_isolation(read_policy(path))


def test_the_guard_keeps_no_file_where_apps_in_namespaces_could_see_it(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml"))
    with pytest.raises(InvalidValue, match="'/usr', which holds the guard's secret"):
        check_hidden(policy, "secret", Path("/usr/local/guard.secret"))


def test_an_app_sees_a_checkouts_packages_and_no_other_files(tmp_path):
    for path in ("pyproject.toml", ".git/config", "ours/__init__.py", "module.py", "notes/a.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    assert {path.name for path in packages_in(tmp_path)} == {"ours", "module.py"}
    assert packages_in(tmp_path / "ours") == [tmp_path / "ours"]
