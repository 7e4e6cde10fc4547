"""Chat templates beside weights: read as `transformers` keeps them, taken along, written again."""

import json

import pytest

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.chat_format import chat_format_of
from mmm.errors import CheckpointError
from mmm.weights.open_weights import open_weights
from mmm_lab.cli import main as cli
from support.llamas import CONFIG, byte_bpe, write_hugging_face

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def written(folder, about=None, jinja=None):
    folder.mkdir(exist_ok=True)
    if about is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def test_where_a_folder_keeps_it(tmp_path):
    assert chat_format_of(tmp_path) is None
    about = {"chat_template": "old", "eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
    assert chat_format_of(written(tmp_path, about)) == ChatFormat("old", TOKENS)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "é"}]
    assert chat_format_of(written(tmp_path, about | {"chat_template": named})).template == "é"
    assert chat_format_of(written(tmp_path, jinja="new\n")) == ChatFormat("new\n", TOKENS)


@pytest.mark.parametrize("about", ['{"chat_template": 3}', "{"])
def test_a_damaged_one_is_refused(tmp_path, about):
    (tmp_path / "tokenizer_config.json").write_text(about)
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        chat_format_of(tmp_path)


def test_it_is_imported_and_exported(tmp_path, capsys):
    config = {**CONFIG, "vocab_size": 258}
    folder = write_hugging_face(tmp_path / "hf", config)
    (folder / "tokenizer.json").write_bytes(byte_bpe(("<s>", "</s>")))
    written(folder, TOKENS, "{{ messages }}")
    for command in (["import", folder, "-o", tmp_path / "own"], ["export", tmp_path / "own", "-o", tmp_path / "again"]):
        assert cli.main(list(map(str, command))) == 0
    for path in (folder, tmp_path / "own", tmp_path / "again"):
        assert open_weights(path).metadata.chat == ChatFormat("{{ messages }}", TOKENS)
        assert open_weights(path).metadata.bos == ()
    manifest = tmp_path / "own" / "checkpoint.json"
    about = json.loads(manifest.read_text())
    assert "chat" in json.dumps(about)
