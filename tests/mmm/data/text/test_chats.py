"""Conversations from JSON lines, in tokens: the mask is exact, what is none is named by file and line."""

import json

import pytest

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.chat_template import DEFAULT, ChatTemplate, chat_template_of
from mmm.data.text.chats import encode_chat, read_chats, rendered
from mmm.data.text.formats import is_chats
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
    assert is_chats(path)
    found = read_chats(path)
    assert [chat.messages for chat in found] == [[QUESTION, ANSWER]] * 4
    assert [chat.where.rpartition(" ")[2] for chat in found] == ["1", "3", "4", "5"]


GOOD = {"messages": [QUESTION, ANSWER]}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"messages": [', "it is no JSON: "),
        ("[1]", "it is no JSON object"),
        ({"text": "x"}, "has neither messages nor prompt"),
        ({"prompt": "x"}, "with one of answer, completion, response"),
        ({"prompt": "x", "answer": "y", "response": "z"}, "with one of answer, completion, response"),
        ({"prompt": 3, "answer": "y"}, "message 1"),
        ({"messages": "x"}, "messages is 'x', which is no list of objects with role and content"),
        ({"messages": []}, "no message has the role assistant"),
        (
            {"messages": [QUESTION, {**ANSWER, "role": "asistant"}]},
            "message 2",
        ),
        ({"messages": [QUESTION, {**ANSWER, "content": " "}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": None}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": "\ufdd0"}]}, "which are no characters"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "message 2 has the weight 0.5"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "has no answer to learn"),
        ({"messages": [QUESTION, ANSWER], "tools": "add"}, "tools are 'add'"),
        ({"prompt": "x", "answer": "y", "system": 3}, "message 1 has the content 3"),
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


BRACKETS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONLY_CONTENT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONLY_MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}


def made(tmp_path, template, record):
    """The text of a line, and its answers."""
    (chat,) = read_chats(lines(tmp_path / "a.jsonl", record))
    text, spans = rendered(chat, ChatTemplate(ChatFormat(template, {"eos_token": "</s>"})))
    return text, [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("template", [ONLY_CONTENT, ONLY_MARKED])
def test_a_message_of_weight_0_is_not_learned(tmp_path, template):
    turns = [QUESTION, {**ANSWER, "content": "A", "weight": 0}, QUESTION, {**ANSWER, "content": "B", "weight": 1}]
    assert made(tmp_path, template, {"messages": turns})[1] == ["B</s>"]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "because"}]}, "reasoning_content of message 2"),
        ({"messages": [QUESTION, {**ANSWER, "thinking": "because"}]}, "thinking of message 2"),
        ({"messages": [QUESTION, CALL, {"role": "tool", "content": "4"}, ANSWER]}, "tool_calls of message 2"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "add"}]}, "tools of the conversation"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tmp_path, record, name):
    with pytest.raises(DataError, match=rf"a.jsonl, line 1: .*leaves out {name}"):
        made(tmp_path, ONLY_CONTENT, record)
    with pytest.raises(DataError, match="line 1"):
        made(tmp_path, DEFAULT, record)


def test_a_message_that_stands_in_another_is_missed_as_well(tmp_path):
    first_and_last = (
        "[user]{{ messages[0].content }}[assistant]{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    )
    turns = [QUESTION, {**ANSWER, "content": "2"}, {**QUESTION, "content": "2 m"}, ANSWER]
    with pytest.raises(DataError, match="leaves out content of message 2"):
        made(tmp_path, first_and_last, {"messages": turns})


def test_what_a_template_writes_is_in_the_text(tmp_path):
    turns = [QUESTION, CALL, {"role": "tool", "content": "4"}, {**ANSWER, "reasoning_content": "because"}]
    text, answers = made(tmp_path, BRACKETS, {"messages": turns, "tools": [{"name": "add"}]})
    assert text.startswith('[{"name": "add"}][user]Größe?</s>[assistant][{"function"')
    assert answers == ['[{"function": {"name": "add", "arguments": "{}"}}]</s>', "(because)2 m</s>"]
    text, answers = made(tmp_path, ONLY_CONTENT, {"prompt": "Größe?", "answer": "2 m", "system": "Short."})
    assert (text, answers) == ("[system]Short.</s>[user]Größe?</s>[assistant]2 m</s>", ["2 m</s>"])
