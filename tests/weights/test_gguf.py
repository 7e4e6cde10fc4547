"""GGUF files in parts, and the tokenizer in a file."""

import json

import pytest
import torch

from mmm.errors import CheckpointError
from mmm.weights.open_weights import open_weights
from support.llamas import CONFIG, tensors, write_gguf


def write_parts(folder, parts=3, name="tiny", **changes):
    """As gguf-split writes them: keys of the model in the first.

    Args:
        changes: of a part's split keys, by its number, as _1={...}.
    """
    weights = tensors(CONFIG)
    names, files = list(weights), []
    for number in range(parts):
        some = {key: weights[key] for key in names[number * len(names) // parts : (number + 1) * len(names) // parts]}
        keys = {"split__no": number, "split__count": parts, "split__tensors__count": len(names)}
        path = folder / f"{name}-{number + 1:05}-of-{parts:05}.gguf"
        files.append(write_gguf(path, CONFIG, some, **{**keys, **changes.get(f"_{number}", {})}))
    return files


@pytest.mark.parametrize("given", [0, 2])
def test_parts_are_one_model(tmp_path, given):
    read, one = open_weights(write_parts(tmp_path)[given]), open_weights(write_gguf(tmp_path / "one.gguf"))
    assert read.sizes == one.sizes
    assert read.entries == one.entries
    for name, entry in one.entries.items():
        whole = ((0,) * len(entry.shape), entry.shape)
        assert torch.equal(read.read(name, *whole), one.read(name, *whole)), name


def test_a_name_like_a_part_s(tmp_path):
    """The keys say what it is."""
    assert open_weights(write_gguf(tmp_path / "tiny-00001-of-00002.gguf")).entries


def test_parts_that_do_not_fit(tmp_path):
    def refused(path, words):
        with pytest.raises(CheckpointError) as caught:
            open_weights(path)
        assert words in str(caught.value)

    files = write_parts(tmp_path)
    refused(files[0].rename(tmp_path / "renamed.gguf"), "whose names have to end in -00001-of-00003.gguf")
    files = write_parts(tmp_path)
    files[1].unlink()
    refused(files[2], "tiny-00002-of-00003.gguf is missing: tiny-00003-of-00003.gguf is one of 3 parts")
    files = write_parts(tmp_path, _1={"split__no": 0})
    refused(files[0], "split.no and split.count are (0, 3), and by its name (1, 3)")
    files = write_parts(tmp_path, _0={"split__tensors__count": 5})
    refused(files[0], "says 5 tensors in all parts, and there are 21")
    files = write_parts(tmp_path)
    write_gguf(files[1], CONFIG, tensors(CONFIG), split__no=1, split__count=3)
    refused(files[0], f"the tensor token_embd.weight is in {files[0]} and in {files[1]}")


LETTERS = ["a", "b", "c", "Ġ", "ab", "<|user|>", "<|end|>", "<|begin|>"]
TOKENIZER = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "gpt-2",
    "tokenizer__ggml__tokens": LETTERS,
    "tokenizer__ggml__merges": ["a b"],
    "tokenizer__ggml__eos_token_id": 0,
}


def added(path):
    return {
        each["content"]: each["special"]
        for each in json.loads(open_weights(path).metadata.tokenizer[1])["added_tokens"]
    }


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer__ggml__token_type": [1] * 7}, "tokenizer.ggml.token_type has 7 values, and there are 8 tokens"),
        ({"tokenizer__ggml__token_type": ["1"] * 8}, "tokenizer.ggml.token_type is no list of int"),
        ({"tokenizer__ggml__token_type": 1}, "tokenizer.ggml.token_type is no list of int"),
        ({"tokenizer__ggml__tokens": [1] * 8}, "tokenizer.ggml.tokens is no list of str"),
        ({"tokenizer__ggml__tokens": [*LETTERS, "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"tokenizer__ggml__eos_token_id": "0"}, "tokenizer.ggml.eos_token_id is '0', which is no token"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_tokenizer_that_is_damaged(tmp_path, keys, words):
    with pytest.raises(CheckpointError) as refused:
        open_weights(write_gguf(tmp_path / "a.gguf", **{**TOKENIZER, **keys}))
    assert words in str(refused.value)


def test_more_types_than_tokens(tmp_path):
    """As llama.cpp takes it."""
    assert added(write_gguf(tmp_path / "a.gguf", **TOKENIZER, tokenizer__ggml__token_type=[1] * 6 + [3] * 9)) == {
        "<|end|>": True,
        "<|begin|>": True,
    }
