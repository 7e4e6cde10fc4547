"""What the fuzzer of files makes of a file: the same by the same seed, and many things by many."""

import json
import os
import random

from fuzz_files.kinds import Kind
from fuzz_files.mutate import DEEP, change_tree, mutate


def make(folder):
    (folder / "case").mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "case" / "a.json").write_text(json.dumps({"name": "a", "sizes": [1, 2, {"b": None}]}))


def changed(folder, seed):
    """What was said, and what lies there."""
    make(folder)
    kind = Kind("kind", make, ("*.json",), make, sparse=True)
    said = mutate(kind, folder / "case", random.Random(seed))
    (path,) = list((folder / "case").iterdir()) or [None]
    if path is None or path.is_symlink() or not path.is_file() or path.stat().st_size > 10 * DEEP:
        return said, path and oct(os.lstat(path).st_mode)
    return said, path.read_bytes()


def test_a_seed_is_a_change(tmp_path):
    first, second = ([changed(tmp_path / f"{run}-{seed}", seed) for seed in range(300)] for run in "ab")
    assert first == second
    assert len(set(first)) > 250
    every = " ".join(said for said, _ in first)
    for what in ("zero in", "fifo in", "link in", "sparse in", "flipped", "cut to", "deep", "removed", "twice"):
        assert what in every
    assert sum(_is_json(content) for _, content in first) > 75  # so that readers get beyond the parser


def _is_json(content):
    try:
        return isinstance(content, bytes) and json.loads(content) is not None
    except (ValueError, RecursionError):
        return False


def test_a_tree_is_not_changed_in_place():
    tree = {"a": [1, {"b": 2}]}
    for seed in range(50):
        change_tree(tree, random.Random(seed))
    assert tree == {"a": [1, {"b": 2}]}
