"""Conversations from JSON lines, in tokens: the mask is exact, what is none is named by file and line."""

import json

import pytest

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.chat_template import chat_template_of
from mmm.data.text.chats import encode_chat, is_chat_file, read_chats
from mmm.data.text.tokenizer import HuggingFaceTokenizer
from mmm.errors import DataError
from support.llamas import byte_bpe

QUESTION, ANSWER = {"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "2 m"}


def lines(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_both_kinds_of_records(tmp_path):
    records = [{"prompt": "Größe?", name: "2 m"} for name in ("answer", "completion", "response")]
    path = lines(tmp_path / "a.jsonl", {"messages": [QUESTION, ANSWER]}, "", *records)
    assert is_chat_file(path)
    found = read_chats(path)
    assert [chat.messages for chat in found] == [[QUESTION, ANSWER]] * 4
    assert [chat.where.rpartition(" ")[2] for chat in found] == ["1", "3", "4", "5"]


def test_other_files_are_left_to_others(tmp_path):
    for name, text in (("a.txt", "one"), ("b.jsonl", '{"text": "one"}'), ("c.jsonl", "")):
        (tmp_path / name).write_text(text)
        assert not is_chat_file(tmp_path / name)
    assert not is_chat_file(tmp_path / "gone.jsonl")
    assert not is_chat_file(tmp_path)
    assert is_chat_file(lines(tmp_path / "d.jsonl", "{broken"))  # `read_chats` names the line


GOOD = {"messages": [QUESTION, ANSWER]}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"messages": [', "it is no JSON: "),
        ("[1]", "it is no JSON object"),
        ({"text": "x"}, "has neither messages nor prompt"),
        ({"prompt": "x"}, "has none of answer, completion, response, the answer to its prompt"),
        ({"prompt": "x", "answer": "y", "response": "z"}, "has answer and response: give one"),
        ({"prompt": 3, "answer": "y"}, "message 1"),
        ({"messages": "x"}, "messages is 'x', which is no list of objects with role and content"),
        ({"messages": []}, "has no answer: no message has the role assistant"),
        (
            {"messages": [QUESTION, {**ANSWER, "role": "asistant"}]},
            "message 2",
        ),
        ({"messages": [QUESTION, {**ANSWER, "content": " "}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": None}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": "\ufdd0"}]}, "which are no characters"),
    ],
    ids=str,
)
def test_refused_by_file_and_line(tmp_path, record, said):
    path = lines(tmp_path / "a.jsonl", GOOD, "", record, GOOD)
    with pytest.raises(DataError) as error:
        read_chats(path)
    assert str(error.value).startswith(f"--text {path}, line 3")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_mask_is_of_answers_alone(tmp_path, kind):
    tokenizer = ByteTokenizer()
    if kind == "bpe":
        tokenizer = HuggingFaceTokenizer(byte_bpe(("<|end|>",)), "made up")
        tokenizer.chat = ChatFormat("", {"eos_token": "<|end|>"})
    end = "\0" if kind == "bytes" else "<|end|>"
    (chat,) = read_chats(
        lines(tmp_path / "a.jsonl", {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "ö"}]})
    )
    found = encode_chat(chat, chat_template_of(tokenizer), tokenizer)
    text = f"user:\nGröße?\n\nassistant:\n2 m{end}\n\nuser:\nGröße?\n\nassistant:\nö{end}\n\n"
    assert tokenizer.decode(found.tokens.tolist()) == text
    runs = "".join(".x"[int(answer)] for answer in found.answers).split(".")
    assert [len(run) for run in runs if run] == [4, 3]
    assert tokenizer.decode(found.tokens[found.answers].tolist()) == f"2 m{end}ö{end}"
