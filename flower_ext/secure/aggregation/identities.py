"""Signed keys of members that know each other, so that no server can pose as one of them.

A member's identity is an Ed25519 key that outlives rounds. In a signed round, the member sends its
two fresh public keys, its identity, and a signature over the round, the member's number and the two
keys. A member that receives the keys accepts them only if its own list of trusted identities has
the sender's identity, and if no other member of the round has the same identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.files import read_secret
from flower_ext.secure.aggregation.aggregation_messages import IDENTITY_BYTES
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.keys_and_ciphers import KEY_BYTES

_DOMAIN = b"flower-ext secure sum identity 1"


@dataclass(frozen=True, kw_only=True, repr=False)
class Identities:
    """A member's identity, and the public keys (32 bytes) of all members that its owner trusts."""

    private: Ed25519PrivateKey
    trusted: frozenset[bytes]

    @classmethod
    def read(cls, key_file: str | Path, members_file: str | Path) -> Identities:
        """Read a private key and a list of public keys, as ``ssh-keygen -t ed25519`` writes them.

        Refuse an unreadable file, a private key that other users can read, a key that is not an
        Ed25519 key, a private key with a password, and a public key that is listed twice.
        """
        secret = read_secret(
            Path(key_file), "sum-identity-key", "a file that `ssh-keygen -t ed25519 -N ''` wrote"
        )
        try:
            private = load_ssh_private_key(secret, password=None)
            lines = Path(members_file).read_bytes().splitlines()
            listed = [load_ssh_public_key(line) for line in lines if line.strip()]
        except Exception as error:  # `cryptography` raises many kinds for malformed files
            raise InvalidValue(
                f"sum-identity-key={str(key_file)!r} and sum-members={str(members_file)!r}: "
                "expected a private key without a password, and a file of one public key per line, "
                f"as `ssh-keygen -t ed25519 -N ''` writes them ({type(error).__name__})"
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidValue(f"sum-identity-key={str(key_file)!r}: expected an Ed25519 key")
        public = [key.public_bytes_raw() for key in listed if isinstance(key, Ed25519PublicKey)]
        if len(public) < len(listed) or len(set(public)) < len(public):
            raise InvalidValue(
                f"sum-members={str(members_file)!r}: expected different Ed25519 keys, one per line"
            )
        return cls(private=private, trusted=frozenset(public))

    @property
    def public(self) -> bytes:
        """The member's own identity."""
        return self.private.public_key().public_bytes_raw()

    def sign(self, context: RoundContext, member: int, keys: bytes) -> bytes:
        """Return this member's identity and signature. In messages, they follow its ``keys``."""
        return self.public + self.private.sign(_statement(context, member, keys))

    def check(self, context: RoundContext, entries: Mapping[int, bytes]) -> None:
        """Raise a ProtocolError unless a trusted identity signed every other member's keys.

        No two members, this one included, may have the same identity. Each entry holds a member's
        keys, identity and signature.
        """
        known = {self.public}
        for member, entry in entries.items():
            keys, identity = entry[: 2 * KEY_BYTES], entry[2 * KEY_BYTES :][:IDENTITY_BYTES]
            if identity not in self.trusted:
                raise ProtocolError(
                    f"identity of member {member}: expected one of the public keys in the file "
                    "that sum-members names in this node's config"
                )
            if identity in known:
                raise ProtocolError(
                    f"identity of member {member}: expected a different identity for each member"
                )
            known.add(identity)
            signature = entry[2 * KEY_BYTES + IDENTITY_BYTES :]
            try:
                Ed25519PublicKey.from_public_bytes(identity).verify(
                    signature, _statement(context, member, keys)
                )
            except InvalidSignature:
                raise ProtocolError(
                    f"signature of member {member}: expected a signature by its identity over its "
                    "keys and this round"
                ) from None


def _statement(context: RoundContext, member: int, keys: bytes) -> bytes:
    """Return the bytes that a member signs: the round, the member's number and its public keys."""
    return _DOMAIN + context.digest + member.to_bytes(8, "big") + keys
