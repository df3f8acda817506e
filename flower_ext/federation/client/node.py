"""A client's node: what its owner permits, and the task on the owner's device.

The owner sets limits, because the server chooses the plan and a client cannot check the plan. For
example, a client does not know how many other clients there are. A client never takes a file path
from the server.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from flwr.app import Context

from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation.client.client_method import ClientMethod
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.messages.addresses import PARTITION, partition_of
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.privacy import NoiseSource, SecureNoise, SeededNoise
from flower_ext.privacy.mechanisms.protections import ProtectedByTraining, Protection
from flower_ext.training import Task

OF_UPLOADS = "client-noise"
"""Purpose of noise that protects an upload: noise on the upload itself, or in the training."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class NodePolicy:
    """Limits that the owner of a node, and the developer of its ClientApp, set.

    Each refusal is a PermissionError.

    The owner of a SuperNode sets these values with ``--node-config``:

    * ``require-secure-noise=true``: the client refuses settings that protect nobody, such as seeded
      noise.
    * ``least-noise-multiplier=0.1``: the client refuses to train with less noise. The value is the
      standard deviation, in clipping norms, of the noise that the client itself adds: to its
      upload, or under `ClipSteps` and in a method's DP-SGD to the sum of each step. The client also
      refuses noise that is not Gaussian, such as objective perturbation, because such noise has no
      noise multiplier. The limit covers queries, but neither evaluations in the
      clear nor answers to questions, such as how many records each user has.
    * ``require-secure-sum=true``: the client sends values that depend on its data only in secure
      sums.
    * ``keep-memory=true``: the client refuses if the server asks it to delete what it remembers.
    * ``least-sum-members``, ``least-sum-threshold-share``, ``sum-identity-key``, ``sum-members``,
      ``sum-colluders`` and ``least-honest-answers``: limits on the secure sums in which the client
      takes part (see `sums.masked`).

    Parameters
    ----------
    context : Context
    allow_seeded_noise : bool
        True if the ClientApp was built for simulation.
    """

    context: Context
    allow_seeded_noise: bool

    @property
    def partition(self) -> int:
        """The partition of this client's data."""
        return partition_of(self.context.node_config)

    @property
    def device(self) -> str | None:
        """The device that the node config names, or None; refuse one that PyTorch does not know."""
        if (named := self.context.node_config.get("device")) is None:
            return None
        name = str(named)
        try:
            torch.device(name)
        except RuntimeError:
            raise InvalidValue.tellable(
                f"node config device={name!r}: expected cpu, cuda or cuda:N"
            ) from None
        return name

    def task(self, task: Task | Callable[[Context], Task]) -> Task:
        """Return the task that the clients of a process share, on the device of this node."""
        shared = task if isinstance(task, Task) else _built(task, self.context)
        return shared if self.device is None else replace(shared, device=self.device)

    @property
    def may_simulate(self) -> bool:
        """True if this client accepts seeded noise and small keys, which protect nobody."""
        return self.allow_seeded_noise and not self.context.node_config.get("require-secure-noise")

    def admit(self, request: ClientRequest, method: ClientMethod | None = None) -> NoiseSource:
        """Refuse a request that the owner does not permit; return the upload's source of noise."""
        if request.kind == "train":
            protection = request.round.protection
            multiplier = protection.noise_multiplier
            # Only the method knows whether it trains by DP-SGD: a server could claim it of any.
            if isinstance(protection, ProtectedByTraining) and method and method.dp_sgd:
                multiplier = method.dp_sgd(request.settings).noise_multiplier
            self.check(protection, multiplier)
        self.require_secure_sum("an update or scores", in_sum=request.is_summed)
        return self.noise(request.round, OF_UPLOADS)

    def check(self, protection: Protection, multiplier: float | None) -> None:
        """Refuse a protection whose noise ``multiplier`` is less than the node's owner requires.

        If the owner requires noise, also refuse noise that has no multiplier.
        """
        least = float(self.context.node_config.get("least-noise-multiplier", 0.0))
        if multiplier is None and least == 0:
            return
        # Rounding may make this client's share of the noise a little smaller than the least noise,
        # although the two are meant to be equal.
        if multiplier is None or not multiplier >= least * (1 - _ROUNDING):
            offered = f"{type(protection).__name__}, whose noise has no multiplier"
            if multiplier is not None:
                offered = f"a noise multiplier of {multiplier:g} on this client"
            raise PermissionError(
                f"the server asks for {offered}: the owner of this node requires "
                f"least-noise-multiplier={least:g}; take a plan with more, or Gaussian, noise"
            )

    def require_secure_sum(self, message: str, *, in_sum: bool) -> None:
        """Refuse to send ``message`` outside a secure sum, if the owner requires such sums."""
        if self.context.node_config.get("require-secure-sum") and not in_sum:
            raise _forbidden(
                f"the server asks for {message} outside a secure sum: the owner of this node "
                "set require-secure-sum=true"
            )

    def check_forgetting(self) -> None:
        """Refuse the server's request to delete memory, if the node's owner forbids deletion."""
        if self.context.node_config.get("keep-memory"):
            raise _forbidden(
                "the server asks this client to delete its memory: the owner of this node set "
                "keep-memory=true"
            )

    def noise(self, of_round: RoundEntries, purpose: str) -> NoiseSource:
        """Return secure noise, or seeded noise if the server asks and this client allows it.

        Seeded noise is independent for each ``purpose``.
        """
        if not of_round.seeded_noise:
            return SecureNoise()
        if not self.may_simulate:
            raise _forbidden(
                "the server asks for seeded noise, which this client does not allow: in "
                "simulation, build the ClientApp by client_app(..., allow_seeded_noise=True); "
                "elsewhere, set seeded_noise=False on the server"
            )
        return SeededNoise(of_round.seed, purpose, self.partition, of_round.number)


def _forbidden(reason: str) -> PermissionError:
    return tellable(PermissionError(reason))


def _built(task: Callable[[Context], Task], context: Context) -> Task:
    """Build the task without the partition, because all clients of a process share one task."""
    node_settings = {
        name: value for name, value in context.node_config.items() if name != PARTITION
    }
    try:
        return task(replace(context, node_config=node_settings))
    except KeyError as error:
        if error.args != (PARTITION,):
            raise
        raise InvalidValue.tellable(
            f"the task reads the node's {PARTITION!r}, but all clients of a process share one "
            "task: load a client's own data in Task.data, which gets the partition"
        ) from None
