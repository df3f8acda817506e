"""Grids in this process that record, or change, the messages on their way."""

from flower_ext.federation import InProcessGrid


class Recorder(InProcessGrid):
    """A grid that records every message of a run, in both directions."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.sent, self.received = [], []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent += messages
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.received += replies
        return replies


class Tampering(InProcessGrid):
    """A grid that changes the replies of chosen partitions on their way back."""

    tamper = {}

    def send_and_receive(self, messages, *, timeout=None):
        out = []
        for reply in super().send_and_receive(messages, timeout=timeout):
            how = self.tamper.get(reply.metadata.src_node_id - 1_000)
            train = reply.metadata.message_type.startswith("train")
            out += how(reply) if how and train else [reply]
        return out
