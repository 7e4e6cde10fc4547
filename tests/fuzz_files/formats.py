"""Strict readers of others' formats, written from their descriptions and not from mmm's code."""

from __future__ import annotations

import json
from math import prod

SAFETENSORS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


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


def _claim(right: bool, otherwise: str) -> None:
    if not right:
        raise BadFormat(otherwise)


def _no_constant(name: str) -> None:
    raise BadFormat(f"{name} is no JSON")
