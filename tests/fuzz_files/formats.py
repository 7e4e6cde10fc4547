"""Strict readers of others' formats, written from their descriptions and not from mmm's code."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

SAFETENSORS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
GGUF_BYTES = {0: 4, 1: 2, 30: 2}  # of an element, by type of tensor: float32, float16, bfloat16


class BadFormat(Exception):
    """What a file is not."""


def safetensors(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each tensor. https://github.com/huggingface/safetensors, section Format."""
    size = int.from_bytes(content[:8], "little")
    _claim(len(content) >= 8 and size <= min(100_000_000, len(content) - 8), "the header is longer than the file")
    try:
        header = json.loads(content[8 : 8 + size], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadFormat(f"the header is no JSON: {error}") from None
    _claim(isinstance(header, dict), "the header is no object")
    about = header.pop("__metadata__", {})
    _claim(about is None or isinstance(about, dict), "__metadata__ is no object")
    _claim(all(isinstance(value, str) for value in (about or {}).values()), "__metadata__ has what is no text")
    body, spans, found = content[8 + size :], [], {}
    for name, entry in header.items():
        _claim(isinstance(entry, dict), f"{name} is no object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        _claim(isinstance(dtype, str) and dtype in SAFETENSORS, "a dtype is not known")
        _claim(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**64 for n in shape), "a shape is none")
        right = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)
        _claim(right and 0 <= offsets[0] <= offsets[1] <= len(body), "offsets are none of the file's")
        _claim(offsets[1] - offsets[0] == prod(shape) * SAFETENSORS[dtype], "bytes and shape differ")
        spans.append(tuple(offsets))
        found[name] = (dtype, tuple(shape), body[slice(*offsets)])
    at = 0
    for begin, end in sorted(spans):
        _claim(begin == at, "tensors overlap, or there is a gap between them")
        at = end
    _claim(at == len(body), "bytes at the end are of no tensor")
    return found


def gguf(content: bytes) -> tuple[dict[str, Any], dict[str, tuple[int, tuple[int, ...], bytes]], list[tuple[int, int]]]:
    """Keys; type, shape and bytes of each tensor; place and width of every number of the header.
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
    numbers: list[tuple[int, int]] = []
    at = 0

    def take(kind: str) -> Any:
        nonlocal at
        size = struct.calcsize(kind)
        _claim(at + size <= len(content), "the header ends early")
        numbers.append((at, size))
        (value,) = struct.unpack_from(f"<{kind}", content, at)
        at += size
        return value

    def text() -> str:
        nonlocal at
        size = take("Q")
        _claim(at + size <= len(content), "a text ends after the file")
        at += size
        try:
            return content[at - size : at].decode()
        except UnicodeDecodeError:
            raise BadFormat("a text is not UTF-8") from None

    def value(kind: int, depth: int = 0) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            _claim(depth < 8, "arrays are nested too deep")
            inner, size = take("I"), take("Q")
            _claim(size <= len(content), "an array is longer than the file")
            return [value(inner, depth + 1) for _ in range(size)]
        _claim(kind in GGUF_SCALARS, "a type is not known")
        found = take(GGUF_SCALARS[kind])
        _claim(kind != 7 or found in (0, 1), "a bool is neither 0 nor 1")
        return bool(found) if kind == 7 else found

    _claim(content[:4] == b"GGUF", "it does not begin with GGUF")
    at = 4
    version, tensors, pairs = take("I"), take("Q"), take("Q")
    _claim(version in (2, 3), "another version")
    keys: dict[str, Any] = {}
    for _ in range(pairs):
        key = text()
        _claim(key not in keys, "a key is there twice")
        keys[key] = value(take("I"))
    entries = []
    for _ in range(tensors):
        name, dims = text(), take("I")
        _claim(1 <= dims <= 4, "a tensor has more than 4 dims, or none")
        shape = tuple(take("Q") for _ in range(dims))[::-1]
        entries.append((name, shape, take("I"), take("Q")))
    _claim(len({name for name, *_ in entries}) == len(entries), "a tensor is there twice")
    aligned = keys.get("general.alignment", 32)
    _claim(type(aligned) is int and aligned > 0 and aligned & (aligned - 1) == 0, "alignment is no power of 2")
    begin, wanted, found = -(-at // aligned) * aligned, 0, {}
    for name, shape, kind, offset in entries:
        _claim(kind in GGUF_BYTES, "a quantized type")
        size = prod(shape) * GGUF_BYTES[kind]
        _claim(offset == wanted, "tensors overlap, or are not where the one before ends")
        _claim(begin + offset + size <= len(content), "a tensor ends after the file")
        found[name] = (kind, shape, content[begin + offset : begin + offset + size])
        wanted = -(-(offset + size) // aligned) * aligned
    return keys, found, numbers


def _claim(right: bool, otherwise: str) -> None:
    if not right:
        raise BadFormat(otherwise)


def _no_constant(name: str) -> None:
    raise BadFormat(f"{name} is no JSON")
