"""Agree on a secret, derive keys that each serve one labelled purpose, and encrypt under a key."""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_ext.errors import InvalidValue

KEY_BYTES = 32
"""Length in bytes of every key: of X25519 and ChaCha20, and as `derive` returns it."""
_NONCE_BYTES = 12
ENCRYPTION_OVERHEAD_BYTES = _NONCE_BYTES + 16
"""Number of bytes that `encrypt` adds to a message: a nonce and a tag."""
_FIELD = 2**255 - 19
_ANY_PRIVATE = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def derive(key: bytes, *label: str | int | bytes) -> bytes:
    """Derive from ``key`` the 32-byte key that serves ``label`` only (HKDF-SHA256).

    Each part of the label is encoded with its type and length, so different labels never collide.
    A part of another type, such as a NumPy integer, is refused: it would give a different key than
    the equal ``int``.
    """
    parts = []
    for part in label:
        if type(part) not in (str, int, bytes):
            raise InvalidValue(f"label part {part!r}: expected a str, an int or bytes")
        raw = part if isinstance(part, bytes) else str(part).encode()
        parts.append(type(part).__name__.encode() + b":" + str(len(raw)).encode() + b":" + raw)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"".join(parts)).derive(key)


def encrypt(key: bytes, message: bytes, header: bytes) -> bytes:
    """Encrypt a message, bound to ``header``, by ChaCha20-Poly1305; a nonce precedes the result."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, message, header)


def decrypt(key: bytes, encrypted: bytes | memoryview, header: bytes) -> bytes:
    """Return the message that `encrypt` encrypted; refuse altered bytes, key or header."""
    nonce, text = encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, text, header)
    except (InvalidTag, ValueError) as error:
        raise InvalidValue(
            "encrypted message: expected bytes that encrypt returned for the same key and header"
        ) from error


def public_of(private: bytes) -> bytes:
    """Return the X25519 public key, 32 bytes, of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes) -> tuple[bytes, bytes]:
    """Return the secret that two X25519 keys share, and the public key that belongs to ``private``.

    Each has 32 bytes. Use the secret only to derive keys.

    Raises
    ------
    InvalidValue
        The public key does not have 32 bytes, is of low order, or is a number not below the field's
        prime. A key of low order gives the same secret with every private key. A number above the
        prime would be a second encoding of some other key.
    """
    key = X25519PrivateKey.from_private_bytes(private)
    return _exchanged(key, public), key.public_key().public_bytes_raw()


def _exchanged(private: X25519PrivateKey, public: bytes) -> bytes:
    refusal = InvalidValue(
        "public key: expected the 32 bytes of an X25519 key that is not of low order"
    )
    if int.from_bytes(public, "little") >= _FIELD:
        raise refusal
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise refusal from error


def check_public(public: bytes) -> None:
    """Refuse a public key with which `agreed` would raise an `InvalidValue`.

    The function tries the key with one fixed private key. This is enough, because an exchange with
    a public key of low order fails for every private key: private keys are multiples of 8, the
    order of the curve's small subgroup.
    """
    _exchanged(_ANY_PRIVATE, public)
