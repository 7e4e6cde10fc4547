"""Execution traces in Chakra's format: a file a rank, of messages in protobuf's wire format, each after its length.

A file is one ``GlobalMetadata``, then the ``Node``s. Written by hand: two kinds of fields are used here, and
a library for them would be one more dependency of every install. `tests/plan/test_trace.py` reads the files with
Google's.

Source: MLCommons Chakra, ``schema/protobuf/et_def.proto``; Sridharan et al., "Chakra: Advancing Performance
Benchmarking and Co-design using Standardized Execution Traces", 2023. Attributes mean what ASTRA-sim 2 reads them as.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

VERSION = "0.0.4"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # NodeType
# CollectiveCommType
OPERATIONS = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
Value = bool | int | str
# AttributeProto's value, by the name of an attribute where its reader wants another type than int64.
FIELDS = {"tensor_size": 13, "comm_src": 7, "comm_dst": 7, "comm_tag": 7, "comm_priority": 7}
INT64, BOOL, STRING = 9, 27, 29


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; of a negative number its two's complement in 64 bits."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def attribute(name: str, value: Value) -> bytes:
    """An ``AttributeProto``."""
    if isinstance(value, bool):
        return _bytes(1, name) + _number(BOOL, value)
    if isinstance(value, str):
        return _bytes(1, name) + _bytes(STRING, value)
    return _bytes(1, name) + _number(FIELDS.get(name, INT64), int(value))


def node(
    number: int,
    name: str,
    kind: int,
    order: Iterable[int],
    data: Iterable[int],
    begin: int,
    duration: int,
    attributes: Mapping[str, Value],
) -> bytes:
    """A ``Node``.

    Args:
        order, data: the nodes that it waits for: ``ctrl_deps`` and ``data_deps``. begin, duration: microseconds.
    """
    fields = [_number(1, number), _bytes(2, name), _number(3, kind)]
    for field, waits_for in ((4, order), (5, data)):
        if packed := b"".join(map(varint, waits_for)):
            fields.append(_bytes(field, packed))
    fields += [_number(6, begin), _number(7, duration)]
    return b"".join([*fields, *(_bytes(10, attribute(key, value)) for key, value in attributes.items())])


def file_of(nodes: Iterable[bytes], attributes: Mapping[str, Value]) -> bytes:
    """All of a rank's file."""
    metadata = _bytes(1, VERSION) + b"".join(_bytes(2, attribute(key, value)) for key, value in attributes.items())
    return b"".join(varint(len(message)) + message for message in (metadata, *nodes))
