"""An entry's manifest: the key's fields, readable, and what its payload must be.

Named fields, each as `[name bytes]` and its value: sha256 and bytes of the payload, label, seconds,
and the key in the same form. The last field is the SHA-256 of all before it, so no change of a
manifest, however small, passes.
"""

from __future__ import annotations

import hashlib

import msgspec

from cache.key import Key, parsed, written

_HEADING = "graphc entry 2"
_NAMES = ("sha256", "bytes", "label", "seconds", "key")
_CHECK = b"[check 64]\n"
_CHECK_BYTES = len(_CHECK) + 65


class Meta(msgspec.Struct, frozen=True):
    """What is stored beside the key. `sha256` and `bytes` are the payload's, `seconds` is what
    making it took."""

    sha256: str
    bytes: int
    label: str = ""
    seconds: float = 0.0


def encode(meta: Meta, key: Key) -> bytes:
    """The manifest's text."""
    values = (meta.sha256, str(meta.bytes), meta.label, f"{meta.seconds:.3f}", key.text())
    body = written(_HEADING, zip(_NAMES, values, strict=True)).encode()
    return body + _CHECK + hashlib.sha256(body).hexdigest().encode() + b"\n"


def decode(data: bytes) -> tuple[Meta, Key]:
    """The inverse of `encode`.

    Raises:
        ValueError: it is cut, changed, or no manifest.
    """
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if check != _CHECK + hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise ValueError("it is cut or changed")
    fields = dict(parsed(_HEADING, body))
    if tuple(fields) != _NAMES:
        raise ValueError(f"expected the fields {_NAMES}, found {tuple(fields)}")
    meta = Meta(fields["sha256"], int(fields["bytes"]), fields["label"], float(fields["seconds"]))
    return meta, Key.parse(fields["key"])
