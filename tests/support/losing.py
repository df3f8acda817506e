"""A grid that loses members of a secure sum in the stage that a test names."""

from flower_ext.federation.sums.masked import BEGIN, KEYS, MASKED_SUM, UNMASK
from tests.support.travelling import Recorder

STAGES = (BEGIN, KEYS, "train", UNMASK)


def stage_of(message):
    """Which of the four stages a message belongs to, None for none."""
    kind = message.metadata.message_type.partition(".")[0]
    if kind == "train":
        return "train"
    if kind == "query" and MASKED_SUM in message.content:
        return next(s for s in STAGES if s in message.content[MASKED_SUM])
    return None


class Losing(Recorder):
    """Loses clients: a message to one of ``lost`` in that stage, or its reply, does not arrive."""

    lost = frozenset()
    answers = frozenset()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        stages = {m.metadata.dst_node_id - 1_000: stage_of(m) for m in messages}
        arriving = [
            m for m in messages if (m.metadata.dst_node_id - 1_000, stage_of(m)) not in self.lost
        ]
        replies = super().send_and_receive(arriving, timeout=timeout)
        return [
            r
            for r in replies
            if (r.metadata.src_node_id - 1_000, stages[r.metadata.src_node_id - 1_000])
            not in self.answers
        ]
