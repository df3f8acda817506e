"""The checks of a client before its vector becomes part of a noised sum."""

import json
from types import SimpleNamespace

import pytest
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue, is_tellable
from flower_ext.federation.client.assignment import NO_DATA, Assignment
from flower_ext.federation.client.evaluating import masked_vector, query_of
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.federation.sums.masked import MaskedMember
from flower_ext.federation.sums.summation import ClientSum
from flower_ext.privacy import SecureScores
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Unprotected

SHARE = ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16)
KINDS = {"scores": SecureScores}
ONE_SCORE = {"noise_multiplier": 1.0, "bounds": [["accuracy", 0.0, 1.0]]}


def request(name="scores", fields=ONE_SCORE, protection=SHARE, sum_type=ClientSum):
    query = {"name": name, "fields": fields if isinstance(fields, str) else json.dumps(fields)}
    round_entries = RoundEntries(number=1, seed=0, query=1, protection=protection)
    return ClientRequest(query=query, round=round_entries, sum_type=sum_type)


def test_a_query_is_what_the_server_asked():
    query = SecureScores(noise_multiplier=1.0, bounds=(("accuracy", 0.0, 1.0),))
    assert query_of(request(), KINDS) == query


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("totals", ONE_SCORE, r"'totals', but this ClientApp answers only \['scores'\]: give"),
        ("scores", "{", "'scores' in the server's message"),
        ("scores", [1.0], "'scores' in the server's message"),
        ("scores", {**ONE_SCORE, "other": 1}, "'scores' in the server's message.*other"),
        ("scores", {"bounds": ONE_SCORE["bounds"]}, "'scores' in the server's message.*noise"),
        ("scores", {**ONE_SCORE, "bounds": []}, "expected one or more scores"),
        ("scores", {**ONE_SCORE, "bounds": [["accuracy", 0.0]]}, "'scores' in the server's"),
        ("scores", {**ONE_SCORE, "bounds": [["accuracy", 0.0, "1"]]}, "expected two finite"),
    ],
)
def test_queries_that_a_client_does_not_know_or_understand_are_refused(name, fields, message):
    with pytest.raises(InvalidValue, match=message) as refusal:
        query_of(request(name, fields), KINDS)
    assert is_tellable(refusal.value)  # the message tells nothing of the client's data


def answer(question, *, least=0.0):
    """Return a client's answer to a query; ``least`` is the least noise that its node accepts."""
    node = {"partition-id": 0, "least-noise-multiplier": least}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    query = query_of(question, KINDS)
    policy = NodePolicy(context, allow_seeded_noise=False)
    method = SimpleNamespace(name="m")
    work = SimpleNamespace(method=method, data=NO_DATA)
    client_sum = question.sum_type({}, context, "m")
    return masked_vector(
        query,
        Assignment(work=work, request=question, policy=policy, sum=client_sum, store=None),
    )


@pytest.mark.parametrize(("least", "error"), [(0.6, PermissionError), (0.4, InvalidValue)])
def test_a_nodes_owner_sets_the_least_noise_of_queries_too(least, error):
    with pytest.raises(error):
        answer(request(), least=least)  # without a secure sum


def test_no_vector_leaves_without_noise_in_cells_and_a_secure_sum():
    unprotected = request(protection=Unprotected(), sum_type=MaskedMember)
    for question in (request(), unprotected):
        with pytest.raises(
            InvalidValue, match="a query without a secure sum, or without a protection"
        ):
            answer(question)
