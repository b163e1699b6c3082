"""A cache entry as one object of a shared tier: manifest, signature, key and payload.

graphc shared entry 1
{"bucket":"kernels-v1","digest":"...","sha256":"...","size":...,"key_size":...,...}
hmac-sha256 <64 digits>          (or: unsigned)
<the key's text><the payload>

One object, so that it appears and is replaced whole. The signature is HMAC-SHA256 over the first
two lines as they stand; the manifest binds the rest by digests: `digest` is that of the key,
`sha256` that of the payload.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import msgspec

from cache.key import Key

_HEADING = b"graphc shared entry 1\n"
_UNSIGNED = b"unsigned"
_SIGNED = b"hmac-sha256 "
_LONGEST_LINE = 1 << 16


class Refused(Exception):
    """Why an object of a shared tier is not used."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an object holds. `size` and `key_size` are in bytes, `seconds` what making it took."""

    bucket: str
    digest: str
    sha256: str
    size: int
    key_size: int
    label: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class SharedEntry:
    """A verified object."""

    key: Key
    payload: bytes
    sha256: str
    label: str
    seconds: float


def encode(
    bucket: str, key: Key, payload: bytes, label: str, seconds: float, secret: bytes | None
) -> bytes:
    """The object of an entry, signed if there is a secret."""
    text = key.text().encode()
    sha256 = hashlib.sha256(payload).hexdigest()
    manifest = Manifest(
        bucket, key.digest, sha256, len(payload), len(text), label, round(seconds, 3)
    )
    head = _HEADING + msgspec.json.encode(manifest) + b"\n"
    line = _UNSIGNED if secret is None else _SIGNED + _signature(head, secret)
    return head + line + b"\n" + text + payload


def decode(data: bytes, bucket: str, digest: str, secret: bytes | None) -> SharedEntry:
    """The entry in `data`, which was found under the name of `digest` in `bucket`. With a secret
    the signature must be right; without one nothing is said about who made it.

    Raises:
        Refused: it is not what its manifest, its name or its signature says.
    """
    if not data.startswith(_HEADING):
        raise Refused("it is no entry of a shared cache")
    end = data.find(b"\n", len(_HEADING), len(_HEADING) + _LONGEST_LINE) + 1
    begin = data.find(b"\n", end, end + 100) + 1
    if not end or not begin:
        raise Refused("it is cut")
    if secret is not None:
        _check_signature(data[:end], data[end : begin - 1], secret)
    try:
        manifest = msgspec.json.decode(data[len(_HEADING) : end - 1], type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(f"its manifest cannot be read: {error}") from None
    if (manifest.bucket, manifest.digest) != (bucket, digest):
        raise Refused(f"it belongs to {manifest.bucket}/{manifest.digest[:12]}")
    if len(data) - begin != manifest.key_size + manifest.size or manifest.key_size < 0:
        raise Refused("its size is not that of its manifest")
    middle = begin + manifest.key_size
    try:
        key = Key.parse(data[begin:middle].decode())
    except ValueError as error:
        raise Refused(f"its key cannot be read: {error}") from None
    if key.digest != digest:
        raise Refused(f"its key is that of {key.digest[:12]}")
    payload = data[middle:]
    if hashlib.sha256(payload).hexdigest() != manifest.sha256:
        raise Refused("its payload is not that of its manifest")
    return SharedEntry(key, payload, manifest.sha256, manifest.label, manifest.seconds)


def _check_signature(head: bytes, line: bytes, secret: bytes) -> None:
    if line == _UNSIGNED:
        raise Refused("it is not signed")
    if not hmac.compare_digest(line, _SIGNED + _signature(head, secret)):
        raise Refused("its signature is not of this key")


def _signature(head: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, head, hashlib.sha256).hexdigest().encode()
