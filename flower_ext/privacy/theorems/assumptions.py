"""The assumptions and other texts that several guarantees share."""

from flower_ext.privacy.mechanisms.noise import IMPROBABLE
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum

ON_A_GRID = (
    "noise and the value that it protects are rounded to a public grid together, and the "
    "generator's Gaussian is exact to the grid's resolution"
)
"""The assumption about Gaussian noise in floating point (see `privacy.mechanisms.noise`)."""
NOT_PROVIDED = "which this run does not provide"
"""Words in an assumption that nothing in the run enforces."""
NO_SECURE_SUM = f"secure aggregation, {NOT_PROVIDED}: the server sees no upload"
SECURE_SUM = (
    "the server follows the protocol of secure aggregation, the keys in its messages reach the "
    "clients unaltered, X25519, ChaCha20 and ChaCha20-Poly1305 are secure, and HKDF-SHA256 acts as "
    "a random oracle"
)
SIGNED_SUM = (
    "the server may lie, but the node config of each client sets sum-identity-key, and sets "
    "sum-members to the identities of these clients, X25519, Ed25519, ChaCha20 and "
    "ChaCha20-Poly1305 are secure, and HKDF-SHA256 acts as a random oracle"
)
ONE_ANSWER = (
    "resist_equivocation is off: the server never tells some neighbours that a client answered and "
    "other neighbours that this client was lost; by such a lie, it could see the client's upload"
)
"""An assumption of secure sums, if their threshold is too low to prevent this lie."""
HONEST_COUNTS = (
    "all silos and the server follow the protocol: a silo or server that lies about counts voids ε "
    "for the users of all silos, because the sum may then hold an update max_records_per_user "
    "times, or more"
)
"""The assumption about weights that nobody can check, because they are secret."""
WHOLE_UPLOADS = "uploads have single precision or wider, so that they add up on the grid"
"""The assumption about sums of uploads to which clients have added the noise."""
OWN_GRADIENTS = (
    "each gradient that a step clips depends on one record alone, to the last bit, and model and "
    "loss store nothing of a record: trials with usual and odd records, at each position of a pass "
    "over a fixed number of records and beside various others, found no exception (evidence, not "
    "proof)"
)
"""The assumption about the gradients of single records in DP-SGD."""
AS_INSTRUCTED = "clients train, clip and add noise as instructed"
PUBLIC_SIZES = "the planned rounds and each client's number of examples are public"
LOADS = "no single record keeps a client from loading its data (Task.data)"
"""The assumption that no single record decides whether a client answers."""
OUTLIVES = (
    "no client's process ends because of the client's data, for example by a crash in native code "
    "or a lack of memory; an exception in Python does not end the process"
)
"""The assumption about failures that a client cannot hide, unlike an exception in training."""
WHAT_REVEALS_A_DRAW = (
    "the server's log and the run directory, except for the model, reveal the draw "
    "(metrics.jsonl, missing.jsonl, ledger.jsonl, guarantee.json, clients.csv, use.json, "
    "checkpoints, report and figures) and stay with the server"
)
HIDDEN_DRAW = (
    "the adversary knows neither who was drawn nor how many were drawn: it is no client, because "
    f"clients that are asked learn how many, and {WHAT_REVEALS_A_DRAW}"
)


def of_noise(secure: bool) -> str:
    """Return the assumption about noise; ``secure`` is False if the noise comes from a seed."""
    if secure:
        return "noise from a cryptographic generator keyed by the operating system"
    return "SIMULATION: noise is reproducible from the seed, which the clients receive"


def of_draw(drawn: str, secure: bool) -> str:
    """Return the assumption about the draw of cohorts or users.

    ``drawn`` names what is drawn, and ``secure`` is False if the draw comes from a seed.
    """
    if secure:
        return f"{drawn} are drawn by a cryptographic generator keyed by the operating system"
    return f"SIMULATION: {drawn} are reproducible from the seed, which the clients receive"


def of_grid(mechanism: NoisedSum) -> str:
    """Return the assumption about noise in floating point, or about the noise of secure sums."""
    if mechanism.secure_sum is None:
        return ON_A_GRID
    return (
        "noise is discrete Gaussian on a public grid, and sums of its shares protect as a "
        "continuous Gaussian does: proven up to a factor of 1 + 1e-120 in each probability "
        "(privacy.mechanisms.discrete_gaussian)"
    )


def of_others_noise(mechanism: NoisedSum) -> tuple[str, ...]:
    """Return the assumptions under which noise of the clients protects released models."""
    none_of_them = (
        "the adversary is none of the parties that add noise, because such a party could subtract "
        "its own share"
    )
    if mechanism.secure_sum is not None:
        return (none_of_them,)
    return (
        WHOLE_UPLOADS,
        none_of_them,
        "the server refuses no honest upload for its norm: for each upload, this fails with "
        f"probability at most {IMPROBABLE:g}, which δ does not count",
    )


def of_secure_sum(mechanism: NoisedSum) -> tuple[str, ...]:
    """Return the assumptions under which a secure sum hides single uploads from the server."""
    sums, masked = mechanism.secure_sum, mechanism.masked
    assert sums is not None
    assert masked is not None
    clients, parameters = mechanism.num_clients, masked.parameters
    drawn = "" if parameters.members == clients else ", with probability at least 1 - 2^-40 a run"
    honest = f", {parameters.honest_answers} of them from honest clients" if sums.signed else ""
    return (
        SIGNED_SUM if sums.signed else SECURE_SUM,
        *(() if sums.resist_equivocation else (ONE_ANSWER,)),
        f"at most {sums.colluders_among(clients)} of {clients} clients collude with the server (a "
        f"fraction of {sums.colluding:.3g}), and these clients were fixed before cohorts and "
        f"neighbours were drawn at random: then at most {parameters.colluders} of each cohort of "
        f"{parameters.members} collude{drawn}; each client has {parameters.num_neighbors} "
        f"neighbours, of whom {parameters.threshold} together could unmask its upload",
        "the server sees who was asked, who took part and when, and sums of at least "
        f"{parameters.least_answers} uploads{honest}",
    )
