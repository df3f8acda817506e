"""Signed sums against a server that lies about keys, members, neighbours or losses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.aggregation_messages import (
    OF_KEY,
    OF_SEED,
    Delivery,
    Keys,
    UnmaskRequest,
)
from flower_ext.secure.aggregation.identities import Identities
from flower_ext.secure.aggregation.mask_streams import apply_mask, pair_mask_key, self_mask_key
from flower_ext.secure.keys_and_ciphers import public_of
from tests.support.identities import write_identities
from tests.support.secure_sum import Round, graph_digest, graph_for, member_of, round_context

MEMBERS = 5


@pytest.fixture(name="identities")
def _identities(tmp_path):
    configs = write_identities(tmp_path, MEMBERS)
    return [Identities.read(c["sum-identity-key"], c["sum-members"]) for c in configs]


def signed_context(number=1, **changes):
    graph = graph_for(MEMBERS, MEMBERS - 1, number)
    context = round_context(MEMBERS, MEMBERS - 1, threshold=3, least=4, number=number)
    return replace(context, graph=graph_digest(graph), signed=True, **changes)


def adverts(context, identities):
    graph = graph_for(MEMBERS, MEMBERS - 1, context.round_number)
    members = [member_of(context, index, near) for index, near in enumerate(graph)]
    sent = [one.advertise(identities=known) for one, known in zip(members, identities, strict=True)]
    return members, {advert.member: advert.keys for advert in sent}


def test_a_signed_round_gives_the_sum_and_every_message_survives_its_bytes(identities):
    one = Round(signed_context())
    for index, member in one.members.items():
        one.server.add(one.sent(member.advertise(identities=identities[index])))
    one.restore()
    keys = {index: one.sent(message) for index, message in one.server.keys().items()}
    for index, message in keys.items():
        shares = one.members[index].share(message, identities=identities[index])
        one.server.add(one.sent(shares))
    one.restore()
    requests = one.mask(one.server.deliveries())
    assert np.array_equal(one.unmask(requests), one.plain_sum())


def forged(pair):
    """Return keys of the server's own, with no signature that fits them."""
    keys = [public_of(bytes([number]) * 32) for number in pair]
    return b"".join(keys)


def test_keys_that_the_server_put_in_place_are_refused(identities):
    context = signed_context()
    members, keys = adverts(context, identities)
    for altered in (
        forged((1, 2)) + keys[1][64:],  # the server's keys under the member's signature
        keys[1][:64] + keys[2][64:],  # another member's signature
        keys[1][:128] + bytes(32),
    ):
        message = Keys(digest=context.digest, keys={**keys, 1: altered})
        with pytest.raises(ProtocolError, match="member 1"):
            members[0].share(message, identities=identities[0])


def test_without_signatures_the_server_in_the_middle_reads_the_upload():
    """The attack that signatures stop, carried out: all others' keys are the server's."""
    context = round_context(MEMBERS, MEMBERS - 1, threshold=3, least=4)
    graph = graph_for(MEMBERS, MEMBERS - 1)
    victim = member_of(context, 0, graph[0])
    public = victim.advertise().keys
    secrets = {other: bytes([other]) * 32 for other in range(1, MEMBERS)}
    played = {
        other: public_of(secret) + public_of(bytes([other + 100]) * 32)
        for other, secret in secrets.items()
    }
    victim.share(Keys(digest=context.digest, keys={0: public, **played}))
    seed = victim.seed  # the server holds all shares of it
    sealed = dict.fromkeys(secrets, bytes(94))
    values = np.arange(context.length, dtype=np.uint32)
    upload = victim.mask(Delivery(digest=context.digest, sealed=sealed), values)
    read = np.frombuffer(upload.values, dtype=np.uint32).copy()
    apply_mask(self_mask_key(context.digest, seed, 0), read, subtract=True)
    for other, secret in secrets.items():
        key = pair_mask_key(context.digest, secret, member=other, other=0, other_public=public[:32])
        apply_mask(key, read, subtract=True)
    assert np.array_equal(read, values)


def test_invented_members_are_refused(identities, tmp_path):
    context = signed_context()
    members, keys = adverts(context, identities)
    (tmp_path / "others").mkdir()
    (config,) = write_identities(tmp_path / "others", 1)
    stranger = Identities.read(config["sum-identity-key"], config["sum-members"])
    unknown = forged((1, 2))
    message = {**keys, 3: unknown + stranger.sign(context, 3, unknown)}
    with pytest.raises(
        ProtocolError, match="identity of member 3: expected one of the public keys"
    ):
        members[0].share(Keys(digest=context.digest, keys=message), identities=identities[0])
    for twice in (1, 0):  # one trusted member that colludes fills two places; or the victim's own
        message = {**keys, 3: unknown + identities[twice].sign(context, 3, unknown)}
        with pytest.raises(
            ProtocolError, match="identity of member 3: expected a different identity"
        ):
            members[0].share(Keys(digest=context.digest, keys=message), identities=identities[0])


def test_keys_signed_for_another_round_or_place_are_refused(identities):
    context, later = signed_context(1), signed_context(2)
    _, old = adverts(context, identities)
    members, keys = adverts(later, identities)
    for stale in (old[2], keys[3]):
        message = Keys(digest=later.digest, keys={**keys, 2: stale})
        with pytest.raises(ProtocolError, match="member"):
            members[0].share(message, identities=identities[0])


def test_the_server_cannot_choose_neighbours_or_leave_signatures_out(identities):
    sparse = round_context(8, 4, threshold=3, least=4)
    with pytest.raises(InvalidValue, match="num_neighbors=4 of a signed round: expected 7"):
        replace(sparse, signed=True)
    unsigned = member_of(sparse, 0, graph_for(8, 4)[0])
    with pytest.raises(ProtocolError, match="this round is not signed"):
        unsigned.advertise(identities=identities[0])
    signed = member_of(signed_context(), 0, graph_for(MEMBERS, MEMBERS - 1)[0])
    with pytest.raises(ProtocolError, match="sum-identity-key"):
        signed.advertise()


def test_no_more_members_are_lost_than_the_answers_leave_room_for(identities):
    """A server that names nobody's answers could have all masks but a member's own removed."""
    one = Round(signed_context())
    for index, member in one.members.items():
        one.server.add(member.advertise(identities=identities[index]))
    for index, message in one.server.keys().items():
        one.server.add(one.members[index].share(message, identities=identities[index]))
    one.mask(one.server.deliveries())
    kinds = dict.fromkeys(range(1, MEMBERS), OF_KEY)
    for lost, answers in ((4, 4), (2, 4), (1, 5)):
        counts = {**kinds, **dict.fromkeys(range(1, MEMBERS - lost), OF_SEED)}
        request = UnmaskRequest(digest=one.context.digest, answers=answers, kinds=counts)
        with pytest.raises(ProtocolError, match=f"{lost} lost neighbours"):
            one.members[0].unmask(request)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_an_identity_that_others_can_read_is_refused(tmp_path, mode):
    (config,) = write_identities(tmp_path, 1)
    key = Path(config["sum-identity-key"])
    key.chmod(mode)
    with pytest.raises(InvalidValue, match=f"^sum-identity-key={key}: other users can read it"):
        Identities.read(key, config["sum-members"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "sum-identity-key"),
        ("no key\n", "expected a private key"),
        ("twice", "different Ed25519 keys"),
    ],
)
def test_unusable_files_are_named(tmp_path, content, expected):
    (config, *_) = write_identities(tmp_path, 2)
    members = tmp_path / "members.pub"
    if content == "twice":
        members.write_text(members.read_text() + "\n" + members.read_text())
    elif content:
        members.write_text(content)
    else:
        config["sum-identity-key"] = str(tmp_path / "missing")
    with pytest.raises(InvalidValue, match=expected):
        Identities.read(config["sum-identity-key"], config["sum-members"])
