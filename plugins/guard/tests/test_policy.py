"""A policy fails closed: unknown names, loose values and unlisted apps and messages are refused."""

import pytest
from guarding import write_policy, write_sum_policy

from flower_ext.errors import InvalidValue
from flower_ext_guard.policy import Refused, read_policy
from tests.support.identities import write_identities


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("timeout = 60", "time-limit = 60", "time-limit"),
        ("timeout = 60", "timeout = 60\nreply-after = 60", "reply-after=60: expected more than"),
        ("timeout = 60", "timeout = inf", "timeout=inf"),
        ("noise-multiplier = 0.5", "noise-multiplier = 0.0", "noise-multiplier=0.0"),
        ("noise-multiplier = 0.5", "", "noise-multiplier=0.0"),
        ("clipping-norm = 1.0", "clipping-norm = nan", "clipping-norm=nan"),
        ("clipping-norm = 1.0", "clipping-norm = 1e300", "a number from 1e-30 to 1e30"),
        ("noise-multiplier = 0.5", "noise-multiplier = 1e-300", "a number from 1e-30 to 1e30"),
        ("clipping-norm = 1.0", "clipping-norms = 1.0", "clipping-norms"),
        ('"clipped-noised-update"', '"everything"', "release='everything'"),
        ('"constants"', '"constants"\nclipping-norm = 1.0', "the reply holds no arrays"),
        ('"namespaces"', '"perhaps"', "isolation='perhaps'"),
        ('apps = "any"', 'apps = ["somebody/plain"]', "SHA-256"),
        ('apps = "any"', "", "apps"),
        ("epsilon = 1000.0", "", "epsilon"),
        ("epsilon = 1000.0", "epsilon = inf", "epsilon=inf"),
        ("delta = 1e-6", "delta = 1.0", "delta=1.0"),
        ("eval_loss = 0.0", 'eval_loss = "0"', "constants.eval_loss='0'"),
        ("eval_loss = 0.0", "eval_loss = nan", "constants.eval_loss=nan"),
        ("num-examples = 1, train", "num-examples = [1], train", "constants.num-examples"),
    ],
)
def test_a_policy_with_a_fault_is_refused_by_name(tmp_path, old, new, words):
    path = write_policy(tmp_path / "guard.toml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidValue) as caught:
        read_policy(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("noise-multiplier = 0.5", "", "noise-multiplier=0.0"),
        (
            "noise-multiplier = 0.5",
            "noise-multiplier = 0.5\nclipping-norm = 1.0",
            "sets the clipping norm",
        ),
        (
            "noise-multiplier = 0.5",
            "noise-multiplier = 0.5\nconstants = {n = 1}",
            "sets the clipping norm",
        ),
        (
            "[messages.train]",
            "[messages.evaluate]",
            "expected this release only in [messages.train]",
        ),
        ("colluders = 0", "colluders = -1", "colluders=-1"),
        ("honest-answers = 3", "honest-answers = 0", "honest-answers=0"),
        ("honest-answers = 3", "", "honest_answers"),
        ("members.pub", "nobody.pub", "nobody.pub"),
    ],
)
def test_a_policy_of_sums_with_a_fault_is_refused_by_name(tmp_path, old, new, words):
    path = write_sum_policy(tmp_path / "guard.toml", write_identities(tmp_path, 3)[0])
    read_policy(path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InvalidValue) as caught:
        read_policy(path)
    assert words in str(caught.value)
    without = path.read_text().split("[sum]")[0]
    path.write_text(without)
    with pytest.raises(InvalidValue):
        read_policy(path)


def test_a_policy_permits_only_the_listed_apps_and_types_of_message(tmp_path):
    known, other = "a" * 64, "b" * 64
    policy = read_policy(write_policy(tmp_path / "guard.toml", apps=f'["{known}"]'))
    policy.check_app(known)
    with pytest.raises(Refused, match=other):
        policy.check_app(other)
    assert policy.of("train").clipping_norm == 1.0
    for message_type in ("train.more", "query", "query.keys", "system", ""):
        with pytest.raises(Refused, match="does not answer"):
            policy.of(message_type)


def test_the_ledger_lies_beside_the_policy(tmp_path):
    policy = read_policy(write_policy(tmp_path / "guard.toml"))
    assert policy.ledger == tmp_path / "ledger.jsonl"
    assert policy.path == tmp_path / "guard.toml"
