"""Plain sums: the server sees each contribution, and discards it once it is added."""

import math
from dataclasses import replace

from flwr.app import Message

from flower_ext.federation.messages.replies import RefusedReply, read_update
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundMechanism
from flower_ext.privacy.mechanisms.updates import as_float64, divided, in_float64, l2_norm

_ROUNDING = 1.0001
"""Factor on the largest norm of an upload. It allows for the rounding of uploads to single
precision or a wider one."""


class PlainSum(Summation):
    """Sums of contributions that the server sees one by one, and discards once they are added.

    Clients or the server bound the contributions and add noise, as the plan says.
    """

    def open(self, opening: Opening) -> OpenSum:
        """Begin the sum of one round, without a message to the clients."""
        return _OpenPlainSum(self.mechanism, opening)


class _OpenPlainSum(OpenSum):
    def __init__(self, mechanism: RoundMechanism, opening: Opening) -> None:
        super().__init__(mechanism, opening)
        like = in_float64(self._like) if mechanism.weighs_examples else self._like
        self._summed = mechanism.begin_sum(like)
        self._examples = 0.0

    def read(self, reply: Message) -> Update:
        mechanism = self._mechanism
        update = read_update(reply, base=self._like, trust_models=not mechanism.client_protects)
        num_examples = update.metrics.get("num-examples", 0 if mechanism.weighs_examples else 1)
        if not num_examples >= 1:
            raise RefusedReply(f"num-examples={num_examples!r}: expected at least 1")
        if mechanism.client_protects:
            self._check_norm(update, self._opening.clients.partition_of(reply))
        self._opening.check(update)
        return update

    def _check_norm(self, update: Update, partition: int) -> None:
        """Refuse an update that is larger than an honest client's can be.

        Clipping an upload that a client has noised would change the noise, so the server refuses
        such an upload if it is too large. `Protection.largest_upload` explains the limit, and
        against which attacks it protects.
        """
        protection, cohort = self._opening.protection, self.cohort
        if protection is None:
            return
        numbers = sum(array.size for array in self._like.values())
        limit = protection.largest_upload(numbers, norms=cohort.norms.get(partition, 1.0))
        if math.isinf(limit):
            return
        bounded = update.arrays
        if protection.bounds_models:
            received = cohort.models.get(partition, self._opening.model)
            bounded = {name: received[name] + step for name, step in update.arrays.items()}
        if (norm := l2_norm(bounded)) > limit * _ROUNDING:
            raise RefusedReply(
                f"norm {norm:.4g}: expected at most {limit:.4g}, the largest norm of an honest "
                "upload (largest_upload of the protection); the client changed the update after it "
                "was protected, or runs a different version of the method"
            )

    # Floating-point sums depend on the order, so add in the order of partitions, not of arrival.
    def add(self, update: Update) -> None:
        arrays = update.arrays
        if self._mechanism.weighs_examples:
            size = update.metrics["num-examples"]
            self._examples += size
            arrays = {name: as_float64(array) * size for name, array in arrays.items()}
        self._summed.add(arrays)

    def close(self) -> Aggregate:
        size, noise = len(self.cohort.partitions), self._opening.noise
        mean = self._mechanism.aggregate(self._summed, cohort_size=size, noise=noise)
        del self._summed  # to free its memory, which is as large as a model
        if not self._mechanism.weighs_examples:
            return mean
        # Turn the mean of the weighted uploads into their sum, divided by the number of examples.
        value = divided(mean.value, self._examples / mean.answered, self._like)
        return replace(mean, value=value)
