"""Changes to files, drawn from a seed: of bytes, of numbers in binary headers, of JSON, of what lies at a name."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

from fuzz_files.kinds import Kind, is_small_file

# Edges of integers and floats.
NUMBERS = (
    0,
    1,
    3,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**61,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**63),
)
# Texts that break a terminal, a path or an encoding.
ODD = ("", "\0", "\x1b[31mred\x1b[0m", "\ud800", "\u202e", "e\u0301" * 9, "../outside/kept", "/dev/zero", "/etc/passwd",
       "a/b", ".", "..", "1e9", "NaN", "x" * 100_000, "{}", "[", "%s", "é" * 50)  # fmt: skip
# Brackets.
DEEP = 100_000
# Bytes of a file that has no content.
SPARSE = 1_500_000_000
_DEEP_MARK = "deep-4f1c"
_TWICE_MARK = "twice-4f1c"


def mutate(kind: Kind, folder: Path, random: random.Random) -> str:
    """Change one of the files in a folder that `Kind.make` has filled, in one to three ways. Returns what was done."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        paths = sorted({path for pattern in kind.files for path in folder.glob(pattern)})
        files = [path for path in paths if is_small_file(path)]
        if not files:
            break
        path = random.choice(files)
        if random.random() < 0.08:
            change = _place(kind, path, folder.parent / "outside" / "kept", random)
        else:
            content = path.read_bytes()
            changed, change = _content(kind, path.name, content, random)
            path.write_bytes(changed)
        done.append(f"{path.name}: {change}")
    return "; ".join(done)


# --- what lies at a name -------------------------------------------------------------------------------------------


def _place(kind: Kind, path: Path, other: Path, random: random.Random) -> str:
    """Put something else in a file's place. other: a file outside of the case's folder."""
    kinds = ["nothing", "empty", "folder", "link", "loop"] * 2
    kinds += [] if kind.trusted else ["fifo", "zero"]
    kinds += ["sparse"] if kind.sparse else []
    chosen = random.choice(kinds)
    content = path.read_bytes()
    path.unlink()
    if chosen == "empty":
        path.touch()
    elif chosen == "folder":
        path.mkdir()
    elif chosen == "link":  # with the right content
        other.write_bytes(content)
        path.symlink_to(other)
    elif chosen == "loop":
        path.symlink_to(path.name)
    elif chosen == "zero":
        path.symlink_to("/dev/zero")
    elif chosen == "fifo":
        os.mkfifo(path)
    elif chosen == "sparse":
        with path.open("wb") as file:
            file.write(content)
            file.truncate(SPARSE)
    return f"{chosen} in its place"


# --- content -------------------------------------------------------------------------------------------------------


def _content(kind: Kind, name: str, content: bytes, random: random.Random) -> tuple[bytes, str]:
    if (unpacked := _unpacked(content)) is not None and random.random() < 0.7:
        if random.random() < 0.1 and not kind.trusted:
            return gzip.compress(unpacked, 1, mtime=0) + gzip.compress(
                bytes(1 << 26), 1, mtime=0
            ) * 64, "unpacks to 4 GB"
        inside, change = _content(kind, name.removesuffix(".gz"), unpacked, random)
        return gzip.compress(inside, 1, mtime=0), f"unpacked, {change}"
    if random.random() < 0.7 and (done := _as_json(content, random)) is not None:
        return done
    return _bytes(content, random)


def _unpacked(content: bytes) -> bytes | None:
    """What a small gzip file has; None for any other."""
    if content[:2] != b"\x1f\x8b" or len(content) > 1 << 20:
        return None
    try:
        result = zlib.decompressobj(31).decompress(content, 1 << 24)
    except zlib.error:
        return None
    return result


def _at(content: bytes, random: random.Random) -> int:
    """A place, more often near the beginning, where headers are."""
    length = max(len(content), 1)
    return random.randrange(min(length, random.choice((16, 64, 512, 4096, length, length))))


def _bytes(content: bytes, random: random.Random) -> tuple[bytes, str]:
    position = _at(content, random)
    other = _at(content, random)
    size = random.choice((1, 2, 4, 8, 64, 1000))
    match random.choice(
        ("flip", "flip", "cut", "insert", "number", "number", "twice", "zeros", "append", "remove", "random")
    ):
        case "flip":
            changed = bytearray(content or b"\0")
            for _ in range(random.choice((1, 1, 2, 8))):
                changed[_at(changed, random)] ^= 1 << random.randrange(8)
            return bytes(changed), "bits flipped"
        case "cut":
            end = random.choice((position, len(content) - 1 - position % 16))
            return content[: max(end, 0)], f"cut to {max(end, 0)} bytes"
        case "insert":
            return content[:position] + random.randbytes(size) + content[
                position:
            ], f"{size} bytes inserted at {position}"
        case "number":
            return number(content, position, random.choice((1, 2, 4, 8)), random)
        case "twice":
            return content[:position] + content[other : other + size] + content[
                position:
            ], f"bytes {other} … again at {position}"
        case "zeros":
            return content[:position] + bytes(size) + content[position + size :], f"{size} zeros at {position}"
        case "append":
            return content + random.choice((random.randbytes(size), bytes(size), content)), "more at its end"
        case "remove":
            return content[:position] + content[position + size :], f"{size} bytes removed at {position}"
    return random.randbytes(random.choice((0, 1, 10, 1000))), "random bytes"


def number(content: bytes, position: int, width: int, random: random.Random) -> tuple[bytes, str]:
    """An integer of `width` bytes at a place, small, negative or huge."""
    order = random.choice(("little", "little", "big"))
    value = (random.choice(NUMBERS) + random.choice((0, 0, 1, -1))) % (1 << 8 * width)
    return content[:position] + value.to_bytes(width, order) + content[
        position + width :
    ], f"{value} as {width} bytes at {position}"


# --- JSON ----------------------------------------------------------------------------------------------------------


def _as_json(content: bytes, random: random.Random) -> tuple[bytes, str] | None:
    """A change of a JSON file, of a line of JSON lines, or of a header of JSON behind its length; None: it is none."""
    size = int.from_bytes(content[:8], "little")
    # safetensors
    if 2 <= size <= len(content) - 8 and content[8:9] == b"{":
        if (done := _json_text(content[8 : 8 + size], random)) is None:
            return None
        text = done[0]
        # The header's length, the header, the tensors.
        length = len(text).to_bytes(8, "little")
        return length + text + content[8 + size :], f"header: {done[1]}"
    if (done := _json_text(content, random)) is not None:
        return done
    lines = content.split(b"\n")
    rows = [index for index, line in enumerate(lines) if line[:1] in (b"{", b"[")]
    if not rows:
        return None
    chosen = random.choice(rows[:2] + rows)
    # The order of lines.
    if random.random() < 0.2:
        lines.insert(random.choice(rows), lines[chosen])
        return b"\n".join(lines), f"line {chosen + 1} again"
    if (done := _json_text(lines[chosen].rstrip(b","), random)) is None:
        return None
    lines[chosen] = done[0] + b"," * lines[chosen].endswith(b",")
    return b"\n".join(lines), f"line {chosen + 1}: {done[1]}"


def _json_text(text: bytes, random: random.Random) -> tuple[bytes, str] | None:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return None
    tree, change = change_tree(loaded, random)
    made = json.dumps(tree, indent=None if b"\n" not in text else 1)
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    # A parser sees no end of it, or a good one.
    closed = random.random() < 0.5
    deep = opening * DEEP + ("1" + closing * DEEP if closed else "")
    made = made.replace(f'"{_DEEP_MARK}"', deep).replace(_TWICE_MARK, random.choice(list(_keys(loaded)) or ["a"]))
    return made.encode("utf-8", "surrogatepass"), change


def change_tree(tree: Any, random: random.Random) -> tuple[Any, str]:
    """A copy of a JSON value with one of its nodes changed, and what was done."""
    root = [copy.deepcopy(tree)]
    places = list(_places(root))
    parent, key = random.choice(places)
    # Leaves are many, and containers few.
    if isinstance(parent[key], dict | list) and random.random() < 0.5:
        parent, key = random.choice(places)
    value = parent[key]
    where = f"{key!r}"[:40]
    if isinstance(parent, dict) and random.random() < 0.25:
        match random.choice(("remove", "rename", "add", "twice")):
            case "remove":
                del parent[key]
                return root[0], f"{where} removed"
            case "rename":
                parent[random.choice(ODD)] = parent.pop(key)
                return root[0], f"{where} renamed"
            case "add":
                parent[random.choice(ODD)] = _value(value, random)
                return root[0], f"a key beside {where}"
            case "twice":
                parent[_TWICE_MARK] = _value(value, random)
                return root[0], "a key twice"
    parent[key] = _value(value, random)
    return root[0], f"{where} is {parent[key]!r}"[:120]


def _value(value: Any, random: random.Random) -> Any:
    """Another value: near the given one, or of any type."""
    if isinstance(value, list) and random.random() < 0.4:
        return random.choice(([], value * 2, value[:-1], [*value, _any(random)], [value], value[::-1]))
    if isinstance(value, int | float) and random.random() < 0.6:
        near = (value + 1, value - 1, -value, value * 2, value + 0.5, str(value))
        # Where readers overflow, or ask for too much memory.
        large = (10**9, 2**31, 2**63, 10**30)
        return random.choice((*near, *large, [value], True, float("nan"), float("inf")))
    if isinstance(value, str) and random.random() < 0.6:
        return random.choice((*ODD, value + "x", value[:-1], value.upper(), [value], {value: value}))
    return _any(random)


def _any(random: random.Random) -> Any:
    samples = (0, 1, -1, 0.5, 10**9, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), -float("inf"))
    others = (None, True, False, [], {}, [[]], [None], {"": None}, [1, "2", None], _DEEP_MARK, "9" * 5000)
    return random.choice((random.choice(samples), random.choice(ODD), random.choice(others)))


def _places(node: Any) -> Any:
    """Every (container, key) below a node, the node's own first."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys)[:40]:
        yield node, key
        yield from _places(node[key])


def _keys(node: Any) -> Any:
    if isinstance(node, dict):
        yield from node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _keys(value)
