"""Ed25519 signatures of files (RFC 8032), with the package cryptography."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE = "signature.json"
_ALGORITHM = "Ed25519"
_HEX_KEY = re.compile(r"[0-9a-f]{64}")


def read_key(key: Path) -> Ed25519PrivateKey:
    """Reads a private Ed25519 key without a password from a PEM file.

    Raises:
        UserError: if the key is missing or of another kind, or the package is not installed.
    """
    _require_package()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise UserError(
            f"--key {key}: cannot be read ({error.strerror}); make a key with: openssl genpkey -algorithm ed25519 -out "
            f"{key}"
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"--key {key}: this is no private key in PEM form without a password ({error})") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"--key {key}: this is no Ed25519 key; make one with: openssl genpkey -algorithm ed25519")
    return private


def sign(key: Ed25519PrivateKey, content: bytes) -> str:
    """Signs bytes, and returns the content of a signature file."""
    public, signature = key.public_key().public_bytes_raw().hex(), key.sign(content).hex()
    return json.dumps({"algorithm": _ALGORITHM, "key": public, "signature": signature}, indent=1) + "\n"


def verify_signature(content: bytes, signature: bytes, trusted: str | None, file: Path) -> str:
    """Verifies a signature, and returns the public key as 64 hexadecimal digits.

    Args:
        content: the signed bytes.
        signature: content of the signature file.
        trusted: public key that must have signed: a PEM file or 64 hexadecimal digits; None accepts any.
        file: path of the signature file, for messages.

    Raises:
        UserError: if the signature is invalid, or another key signed.
    """
    _require_package()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        parts = json.loads(signature)
        if parts["algorithm"] != _ALGORITHM:
            raise ValueError(f"the algorithm is {parts['algorithm']}")
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(parts["key"]))
        public.verify(bytes.fromhex(parts["signature"]), content)
    except InvalidSignature:
        raise UserError(f"{file}: the signature does not fit: the proof has been changed since it was signed") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if trusted is not None and (expected := _read_public_key(trusted)) != parts["key"]:
        raise UserError(f"{file}: signed by the key {parts['key']}, and not by {expected}")
    return str(parts["key"])


def _read_public_key(text: str) -> str:
    if _HEX_KEY.fullmatch(text):
        return text
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key: Ed25519PublicKey | object = load_pem_public_key(Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"--signed-by {text}: neither 64 hexadecimal digits nor a public key ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"--signed-by {text}: this is no Ed25519 key")
    return key.public_bytes_raw().hex()


def _require_package() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UserError("signatures need the package cryptography: pip install 'lm_trainer[prove]'") from None
