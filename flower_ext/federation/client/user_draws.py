"""Draw the same users in all silos, without a message and without the server's knowledge.

To draw the users of a round, each silo computes HMAC-SHA-256 of the run and the round, under a
secret that the silos share (`Task.draw_key`). The result is the key of a random generator. Draws
are independent only if no round comes twice: in a repeated round, the server could ask for the same
users under another model. Each silo therefore stores the number of the newest round for which it
drew users, and refuses to draw without a ``state-folder``.
"""

import hashlib

from flwr.app import Context

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.privacy import PoissonSampling
from flower_ext.privacy.randomness import keyed_generator
from flower_ext.training import Task

FINGERPRINT_BYTES = 16


def draw_users(
    task: Task,
    vault: ClientVault,
    run: tuple[str, int],
    training_round: int,
    sampling: PoissonSampling,
) -> list[int]:
    """Return the users of a training round, in ascending order; all silos draw the same.

    The generator's key includes ``run``: the run's name and Flower's run id. A resumed run has a
    new id, so it draws anew. Raise a `ProtocolError` if this silo has already drawn the users
    of this round or of a later one.
    """
    key = _key_of(task, vault)
    if training_round <= (newest := int.from_bytes(vault.load() or b"")):
        raise ProtocolError.tellable(
            f"the server asks for the users of round {training_round}, but this silo has drawn "
            f"users up to round {newest}: expected a new round, because a repeated round draws the "
            "same users"
        )
    vault.store(training_round.to_bytes(8))  # before anything leaves
    return sampling.draw(keyed_generator(key, "users", *run, training_round))


def draw_fingerprint(task: Task, vault: ClientVault) -> bytes:
    """Return 16 bytes that are equal in silos with the same key and the same generator."""
    trial = keyed_generator(_key_of(task, vault), "fingerprint").random(256)
    return hashlib.sha256(trial.astype("<f8").tobytes()).digest()[:FINGERPRINT_BYTES]


def draws_vault(context: Context, method: str) -> ClientVault:
    """Return a silo's memory of the newest round for which it drew users."""
    return ClientVault(context, f"{method}-draws", is_permanent=True)


def _key_of(task: Task, vault: ClientVault) -> bytes:
    """Return the silos' key; refuse a task without key, and a node without ``state-folder``."""
    if not vault.outlives_process:
        raise InvalidValue.tellable(
            "this silo would forget at a restart which users it drew, and could draw them "
            "again: name a state-folder in its node config"
        )
    if task.draw_key is None:
        raise InvalidValue.tellable(
            "this silo has no key with which to draw users: set Task(draw_key=...) to the key that "
            "all silos share, from the file that `flower-ext link key` writes"
        )
    return task.draw_key
