"""The field's words: what the code calls things, and how it speaks of them."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "mmm"
FILES = sorted(SOURCE.rglob("*.py"))

# Names that this code once had of its own, and what the field says instead.
NAMES = {
    "settle": "resolve",
    "settling": "what the block does",
    "setting": "resolved",
    "divide": "partition",
    "division": "partition",
    "uncut": "replicated",
    "whole": "full",
    "held": "local",
    "copies": "replicas",
    "mine": "first_sample, local_…",
    "share": "local_loss",
    "judge": "evaluate",
    "how": "techniques",
    "here": "model, local_…",
    "work_out": "compute, expert_forward",
    "attend": "attention_fn",
    "pass_on": "send_recv, forward",
    "mend": "fix",
    "usual_iters": "default_max_iters",
    "wishes": "options",
    "roll_call": "rendezvous",
    "orders": "commands",
    "meeting_point": "master_address",
    "starter": "launcher backend",
    "fold": "finalize",
    "cut": "sharded; of layers: split",
    "sendable": "to_group_device",
    "tie_again": "retie",
    "first_names": "tied_aliases",
    "shared_by": "n_rep",
    "of_loss_ranks": "loss_rank_slice",
}
ALONE = {"here"}  # wrong as a name, and right in one: is_here
FIELD = {"held_out"}  # the field's own
CLASSES = {
    "Setting": "Resolved…",
    "Division": "Partition",
    "Uncut": "Replicated",
    "Copies": "Replicas",
    "OutputLater": "DeferredLMHead",
    "Vocabulary": "VocabShard",
    "Parcel": "a P2P exchange",
    "Wishes": "LaunchOptions",
    "Head": "Controller",
    "Member": "Agent",
    "Box": "ShardBox",
}
VERBS = re.compile(
    r"\b(settl(e|es|ed|ing)|work(s|ed|ing)?( \w+)? out|mend(s|ed|ing)?|judg(e|es|ed|ing)|hand(s|ed|ing)? on)\b",
    re.IGNORECASE,
)


def _given(tree):
    """Every name that the code gives: variables, attributes, arguments, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _said(text):
    """Comments, docstrings and messages, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def _instead(name):
    """What to say instead of a name, or of a word in it; None where it may stand."""
    low = name.strip("_").lower()
    if name in CLASSES or low in NAMES:
        return CLASSES.get(name) or NAMES[low]
    parts = f"_{low}_"
    words = (word for word in NAMES if word not in ALONE and f"_{word}_" in parts)
    return None if low in FIELD else next(map(NAMES.get, words), None)


def _wrong_names(text):
    return [
        f"line {line}: {name}: say {instead}" for line, name in _given(ast.parse(text)) if (instead := _instead(name))
    ]


def _wrong_verbs(text):
    return [f"line {number}: {line.strip()}" for number, line in _said(text) if VERBS.search(line)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_fields_words(path):
    text = path.read_text(encoding="utf-8")
    wrong = _wrong_names(text) + _wrong_verbs(text)
    assert not wrong, "\n".join(wrong)


def test_no_class_name_means_two_things():
    seen = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                seen.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    twice = {name: files for name, files in seen.items() if len(files) > 1}
    # Each program has its own options, and each model its own attention.
    assert set(twice) <= {"Config", "Attention", "Block"}, twice


@pytest.mark.parametrize(
    "text",
    [
        "def settle(): ...",
        "whole = 1",
        "class Box: ...",
        "def loss_cut(): ...",
        "whole_model = 1",
        "def f(how): ...",
        "self.held = 1",
        "shared_by = 1",
        "class Vocabulary: ...",
        "# it is worked out",
        "# works each out",
    ],
)
def test_a_word_is_seen(text):
    assert _wrong_names(text) or _wrong_verbs(text)
