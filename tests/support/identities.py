"""Key files of members that know each other, as `ssh-keygen` writes them."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from flower_ext.files import write_whole


def write_identities(folder, count):
    """Write the files of ``count`` members; return each one's entries of the node config."""
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    members = folder / "members.pub"
    members.write_bytes(
        b"\n".join(
            key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for key in keys
        )
    )
    configs = []
    for number, key in enumerate(keys):
        file = folder / f"identity-{number}"
        write_whole(file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        configs.append({"sum-identity-key": str(file), "sum-members": str(members)})
    return configs
