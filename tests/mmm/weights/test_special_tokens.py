"""Which tokens begin and end the texts of a model that others have written."""

import json
import sys

import pytest
import tokenizers

from mmm.errors import CheckpointError, ConfigError, DataError
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.own import write_own
from support.llamas import begin_with, byte_bpe, sentencepiece_model, write_hugging_face

LINES = ["to be or not to be"] * 9
BEGIN, END = "<|begin|>", "<|end|>"  # tokens 256 and 257


def folder_of(path, tokenizer, name="tokenizer.json", **files):
    """A folder of Hugging Face's, with a tokenizer and further files of JSON."""
    write_hugging_face(path)
    (path / "tokenizer.json").unlink()
    (path / name).write_bytes(tokenizer)
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    return path


def begun_by(weights):
    """What the package tokenizers begins a text with."""
    encoded = tokenizers.Tokenizer.from_buffer(weights.metadata.tokenizer[1]).encode("abc")
    return tuple(encoded.ids[: encoded.special_tokens_mask.index(0)])


TEMPLATE = begin_with(BEGIN)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CLS = {"type": "BertProcessing", "sep": [END, 257], "cls": [BEGIN, 256]}
AFTER = {**TEMPLATE, "single": TEMPLATE["single"][::-1], "pair": TEMPLATE["pair"][::-1]}


@pytest.mark.parametrize(
    ("post_processor", "config", "bos"),
    [
        (TEMPLATE, {}, (256,)),
        ({"type": "Sequence", "processors": [BYTES, TEMPLATE]}, {}, (256,)),
        (begin_with(BEGIN, END), {}, (256, 257)),
        (CLS, {}, (256,)),
        (AFTER, {}, ()),
        (BYTES, {}, ()),
        (None, {}, ()),
        (None, {"add_bos_token": False, "bos_token": BEGIN}, ()),
        (None, {"add_bos_token": True, "bos_token": BEGIN}, (256,)),
        (BYTES, {"add_bos_token": True, "bos_token": {"content": BEGIN, "special": True}}, (256,)),
        (None, {"add_bos_token": True, "bos_token": None}, ()),
        (TEMPLATE, {"add_bos_token": True, "bos_token": BEGIN}, (256,)),
        (TEMPLATE, {"add_bos_token": False, "bos_token": BEGIN}, (256,)),
    ],
)
def test_what_a_tokenizer_json_begins_texts_with(tmp_path, post_processor, config, bos):
    """As transformers 5 does, and for a post-processor that adds none, as 4 does."""
    path = folder_of(tmp_path / "hf", byte_bpe((BEGIN, END), post_processor), tokenizer_config=config)
    weights = open_weights(path)
    assert weights.metadata.bos == bos
    if not config:
        assert begun_by(weights) == bos
    write_own(weights, tmp_path / "own")
    assert open_weights(tmp_path / "own").metadata.bos == bos


def test_the_name_of_the_first_token_is_in_another_file(tmp_path):
    more = {"special_tokens_map": {"bos_token": BEGIN}, "tokenizer_config": {"add_bos_token": True}}
    assert open_weights(folder_of(tmp_path / "hf", byte_bpe((BEGIN,)), **more)).metadata.bos == (256,)
    more = {"tokenizer_config": {"add_bos_token": True, "bos_token": "<s>"}}
    with pytest.raises(ConfigError, match="has no token '<s>'"):
        open_weights(folder_of(tmp_path / "other", byte_bpe((BEGIN,)), **more))


@pytest.mark.parametrize(
    ("config", "options", "bos"),
    [({}, {}, (1,)), ({"add_bos_token": True}, {}, (1,)), ({"add_bos_token": False}, {}, ()), ({}, {"bos_id": -1}, ())],
)
def test_what_a_sentencepiece_model_begins_texts_with(tmp_path, config, options, bos):
    path = folder_of(
        tmp_path / "hf",
        sentencepiece_model(LINES, vocab_size=40, **options),
        "tokenizer.model",
        tokenizer_config=config,
    )
    assert open_weights(path).metadata.bos == bos
    export(open_weights(path), tmp_path / "again", None, 10**9, print)
    assert open_weights(tmp_path / "again").metadata.bos == bos


def test_a_tokenizer_that_cannot_be_read(tmp_path, monkeypatch):
    for i, content in enumerate((b"{", b"[]", b'{"post_processor": {"type": "TemplateProcessing"}}')):
        with pytest.raises(DataError, match=r"tokenizer.json"):
            open_weights(folder_of(tmp_path / str(i), content))
    path = folder_of(tmp_path / "hf", sentencepiece_model(LINES, vocab_size=40), "tokenizer.model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match="needs the package sentencepiece"):
        open_weights(path)


def test_a_generation_config_that_is_damaged(tmp_path):
    path = write_hugging_face(tmp_path / "hf")
    for content, message in (
        ('{"eos_token_id": ["7"]}', r"generation_config.json: eos_token_id is \['7'\]"),
        ("{", "not JSON"),
    ):
        (path / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            open_weights(path)
