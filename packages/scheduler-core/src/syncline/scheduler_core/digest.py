"""One fingerprint for equal values, the same in every process and on every machine.

The sha256 of a canonical encoding. Each value begins with a letter that names its kind and says
where it ends, so no two different values have one encoding:

    None n    True t    False f    int i<decimal>;    float d<8 bytes, IEEE 754, big endian>
    str s<number of bytes>:<UTF-8>    bytes b<number of bytes>:<bytes>    tuple (<items>)
    mapping {<key><value>...}    frozenset <<items>>    both in order of their encoded keys or items
    dataclass @<str: class name><str: field name><value>...;    every field, in order of declaration

Knows no plan: a field added to one is encoded because it is there.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import index
from typing import Any, Final, SupportsIndex, cast


def digest(value: object) -> str:
    """sha256 of the canonical encoding, as hex. Raises ValueError for a kind it does not know."""
    return hashlib.sha256(encode(value)).hexdigest()


def encode(value: object) -> bytes:
    """The canonical encoding. Raises ValueError for a kind it does not know."""
    for kind, encode_kind in _KINDS:
        if isinstance(value, kind):
            return encode_kind(value)
    if hasattr(value, "__index__"):
        return _encode_int(index(cast("SupportsIndex", value)))  # An integer of some library.
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_dataclass(value)
    raise ValueError(f"value must be of a kind with a canonical encoding, got {type(value)}")


def _encode_int(value: int) -> bytes:
    return b"i%d;" % value


def _encode_float(value: float) -> bytes:
    return b"d" + struct.pack(">d", value)


def _encode_str(value: str) -> bytes:
    data = str.encode(value)
    return b"s%d:%b" % (len(data), data)


def _encode_bytes(value: bytes) -> bytes:
    return b"b%d:%b" % (len(value), value)


def _encode_tuple(value: tuple[object, ...]) -> bytes:
    if value and {*map(type, value)} == {int}:  # Rows, blocks, tokens: nearly all there is.
        return b"(i%b;)" % ";i".join(map(str, value)).encode()
    return b"(%b)" % b"".join(map(encode, value))


def _encode_mapping(value: Mapping[object, object]) -> bytes:
    return b"{%b}" % b"".join(sorted(encode(key) + encode(held) for key, held in value.items()))


def _encode_frozenset(value: frozenset[object]) -> bytes:
    return b"<%b>" % b"".join(sorted(map(encode, value)))


def _encode_dataclass(value: Any) -> bytes:  # Any: typeshed's type of a dataclass is private
    parts = [b"@", _encode_str(type(value).__name__)]
    for field in fields(value):
        parts += [_encode_str(field.name), encode(object.__getattribute__(value, field.name))]
    return b"%b;" % b"".join(parts)


# In order: a bool is an int.
_KINDS: Final[tuple[tuple[type, Callable[[Any], bytes]], ...]] = (  # Any: each gets its own kind
    (type(None), lambda _: b"n"),
    (bool, lambda value: b"t" if value else b"f"),
    (int, _encode_int),
    (float, _encode_float),
    (str, _encode_str),
    (bytes, _encode_bytes),
    (tuple, _encode_tuple),
    (Mapping, _encode_mapping),
    (frozenset, _encode_frozenset),
)
