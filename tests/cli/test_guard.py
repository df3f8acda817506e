"""The guard says at its start what a reply costs, and refuses a budget that pays for none."""

import re

import pytest

from flower_ext.cli.guard import costs
from flower_ext.errors import InvalidValue
from flower_ext.guard.policy import read_policy
from flower_ext.privacy import privacy_loss_of
from tests.support.guarding import write_policy


def test_the_budget_pays_for_as_many_replies_as_the_guard_says(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml"))
    (line,) = costs(policy)
    paid = int(re.search(r"pays for (\d+) on", line)[1])
    spend = policy.messages["train"].spend()
    spent, more = (privacy_loss_of({spend: n}, delta=1e-6).epsilon for n in (paid, paid + 1))
    assert spent <= policy.budget.epsilon < more


def test_a_budget_that_pays_for_no_reply_is_refused(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml", epsilon=20))
    with pytest.raises(InvalidValue, match=r"one reply costs ε = 26\.4"):
        costs(policy)
