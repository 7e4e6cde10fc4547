"""Conversations from JSON lines, in tokens: the mask is exact, what is none is named by file and line. Conversations as
text: what templates see, where answers are, what is refused. Conversations as samples: loss on answers alone, each once
an epoch, the same for whichever rank asks; none is cut in silence."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.chat_template import DEFAULT, ChatTemplate, chat_template_of
from mmm.data.text.chat_tokens import ChatText, ChatTokens
from mmm.data.text.chats import ChatArrays, encode_chat, read_chats, rendered
from mmm.data.text.tokenizer import HuggingFaceTokenizer
from mmm.errors import DataError
from mmm.layout import PADDING
from support.llamas import byte_bpe

QUESTION, ANSWER = {"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "2 m"}


def lines(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_both_kinds_of_records(tmp_path):
    records = [{"prompt": "Größe?", name: "2 m"} for name in ("answer", "completion", "response")]
    path = lines(tmp_path / "a.jsonl", {"messages": [QUESTION, ANSWER]}, "", *records)
    chats = read_chats(path)
    assert [chat.messages for chat in chats] == [[QUESTION, ANSWER]] * 4
    assert [chat.where.rpartition(" ")[2] for chat in chats] == ["1", "3", "4", "5"]


GOOD = {"messages": [QUESTION, ANSWER]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"messages": [', "it is not JSON: "),
        ("[1]", "it is not a JSON object"),
        ({"text": "x"}, "if its lines are texts, prepare them by mmm tokens"),
        ({"prompt": "x"}, "with one of answer, completion, response"),
        ({"prompt": "x", "answer": "y", "response": "z"}, "with one of answer, completion, response"),
        ({"prompt": 3, "answer": "y"}, "message 1"),
        ({"messages": "x"}, "messages is 'x', which is not a list of objects with role and content"),
        ({"messages": []}, "no message has the role assistant"),
        ({"messages": [QUESTION, {**ANSWER, "role": "asistant"}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": " "}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": None}]}, "message 2"),
        ({"messages": [QUESTION, {**ANSWER, "content": "\ufdd0"}]}, "which are not characters"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "message 2 has the weight 0.5"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "message 2 has the weight 0"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "add"}]}, "its tools are not written"),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "add"}]}]}, "message 2 has tool_calls"),
        ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "because"}]}, "message 2 has reasoning_content"),
        ({"messages": [QUESTION, {**QUESTION, "role": "tool"}, ANSWER]}, "message 2 has the role 'tool'"),
        ({"prompt": "x", "answer": "y", "system": 3}, "message 1 has the content 3"),
    ],
    ids=str,
)
def test_refused_by_file_and_line(tmp_path, record, reason):
    path = lines(tmp_path / "a.jsonl", GOOD, "", record, GOOD)
    with pytest.raises(DataError) as error:
        read_chats(path)
    assert str(error.value).startswith(f"--text {path}, line 3")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_mask_is_of_answers_alone(tmp_path):
    tokenizer = HuggingFaceTokenizer(byte_bpe(("<|end|>",)), "made up")
    tokenizer.chat = ChatFormat("", {"eos_token": "<|end|>"})
    end = "<|end|>"
    (chat,) = read_chats(
        lines(tmp_path / "a.jsonl", {"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "ö"}]})
    )
    encoded = encode_chat(chat, chat_template_of(tokenizer), tokenizer)
    text = f"user:\nGröße?\n\nassistant:\n2 m{end}\n\nuser:\nGröße?\n\nassistant:\nö{end}\n\n"
    assert tokenizer.decode(encoded.tokens.tolist()) == text
    runs = "".join(".x"[int(answer)] for answer in encoded.answers).split(".")
    assert [len(run) for run in runs if run] == [4, 3]
    assert tokenizer.decode(encoded.tokens[encoded.answers].tolist()) == f"2 m{end}ö{end}"


ONLY_CONTENT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_what_the_system_says_comes_first_and_is_no_answer(tmp_path):
    (chat,) = read_chats(lines(tmp_path / "a.jsonl", {"prompt": "Größe?", "answer": "2 m", "system": "Short."}))
    text, spans = rendered(chat, ChatTemplate(ChatFormat(ONLY_CONTENT, {"eos_token": "</s>"})))
    assert text == "[system]Short.</s>[user]Größe?</s>[assistant]2 m</s>"
    assert [text[begin:end] for begin, end in spans] == ["2 m</s>"]


CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- for m in messages %}\n    {%- if m.role == 'assistant' %}\n"
    "<a>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}</a>\n"
    "    {%- else %}\n<q>{{ m.content }}</q>\n    {%- endif %}\n{%- endfor %}"
)
FORGETFUL = (  # as templates that keep only the last answer's reasoning
    "{% for m in messages %}{% if loop.last %}{{ '!' }}{% endif %}{{ m.content + '\n' }}{% endfor %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]


def answers(template, tokens=TOKENS, messages=TURNS):
    text, spans = ChatTemplate(ChatFormat(template, tokens)).text_and_answers(messages)
    return text, [text[slice(*span)] for span in spans]


def test_each_answer_with_the_token_that_ends_it():
    text, answer_texts = answers(CHATML, {"eos_token": "<|im_end|>"})
    assert answer_texts == ["1<|im_end|>", "2<|im_end|>"]
    assert text.startswith("<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n")
    assert answers(CHATML, {})[1] == ["1<|im_end|>\n", "2<|im_end|>\n"]  # nobody knows which token ends it
    assert answers(LLAMA_2)[1] == [" 1 </s>", " 2 </s>"]


NO_PROMPT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
TWO_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
SPECIAL = ("<end>", "</s>", "<s>")


@pytest.mark.parametrize(
    ("template", "messages", "answer_texts"),
    [
        # Neither the role nor the line end after the token that ends a turn is a target.
        (NO_PROMPT, TURNS, ["1<end>", "2<end>"]),
        # The text of a conversation has an end of its own: the model writes the first one.
        (TWO_ENDS, TURNS[:2], ["1<end>"]),
        (CHATML, TURNS, ["1<|im_end|>\n", "2<|im_end|>\n"]),
    ],
    ids=["no prompt", "two ends", "no special token"],
)
def test_an_answer_ends_with_the_first_special_token_after_it(template, messages, answer_texts):
    """Whatever the tokenizer's eos_token is. A base's is that of its texts, and no turn ends with it."""
    made = ChatTemplate(ChatFormat(template, TOKENS), SPECIAL)
    text, spans = made.text_and_answers(messages)
    assert [text[slice(*span)] for span in spans] == answer_texts
    ends = answer_texts[0].removeprefix("1")
    assert made.end_of_answers() == (ends if ends in SPECIAL else "")


def test_a_prompt_has_the_role_that_is_no_target():
    made = ChatTemplate(ChatFormat(NO_PROMPT, TOKENS), SPECIAL)
    assert made.render(TURNS[:1], add_generation_prompt=True) == "<|user|>\none?<end>\n<|assistant|>\n"
    made = ChatTemplate(ChatFormat(LLAMA_2, TOKENS), SPECIAL)
    assert made.render(TURNS[:1], add_generation_prompt=True) == "<s>[INST] one? [/INST]"


def test_generation_blocks():
    text, answer_texts = answers(MARKED)
    assert answer_texts == ["1</s>", "2</s>"]
    assert text == "<q>one?</q><a>1</s></a><q>two?</q><a>2</s></a>"


def test_the_plain_template():
    text, answer_texts = answers(DEFAULT, {"eos_token": "\0"})
    assert text == "user:\none?\n\nassistant:\n1\0\n\nuser:\ntwo?\n\nassistant:\n2\0\n\n"
    assert answer_texts == ["1\0", "2\0"]
    tokenizer = HuggingFaceTokenizer(byte_bpe(("</s>",)), "made up")
    tokenizer.chat = ChatFormat("", {"eos_token": "</s>"})
    assert chat_template_of(tokenizer).render(TURNS[:2]) == "user:\none?\n\nassistant:\n1</s>\n\n"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{% for", TURNS, "line 1"),
        (FORGETFUL, TURNS, "message 2"),
        (LLAMA_2, [{"role": "tool", "content": "x"}, *TURNS], "does not take it: no role tool"),
        ("{{ messages[0].content }}", TURNS, r"message 2"),
        # What is left out stands in a message that is not.
        (
            "{{ messages[0].content }}{% generation %}{{ messages[-1].content }}{% endgeneration %}",
            [QUESTION, {**ANSWER, "content": "2"}, {**QUESTION, "content": "2 m"}, ANSWER],
            "leaves out, or changes, message 3",
        ),
        ("{{ messages[9].content.x }}", TURNS, "does not take it: "),
        ("{{ strftime_now('%d') }}", TURNS, "'strftime_now' is undefined"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", TURNS, "is unsafe"),
        ("{{ messages.append(1) }}", TURNS, "is not safely callable|unsafe"),
    ],
)
def test_refused(template, messages, reason):
    with pytest.raises(DataError, match=reason):
        answers(template, messages=messages)


def test_json_is_written_as_it_is():
    assert ChatTemplate(ChatFormat("{{ {'a': '<é>'} | tojson }}")).render([]) == '{"a": "<é>"}'


SEQ = 16


def chat(conversation, questions, answers):
    """Tokens of which the number of the conversation is the hundreds; a question, then an answer."""
    tokens = 100 * conversation + np.arange(questions + answers)
    return ChatArrays(tokens, np.arange(questions + answers) >= questions)


@pytest.fixture(scope="module")
def text():
    lengths = np.random.RandomState(0).randint(1, 8, (30, 2))
    return ChatText(Path("a.jsonl"), [chat(n, *length) for n, length in enumerate(lengths, start=1)])


def parts(row):
    """The conversations of a sample: number → (inputs, targets)."""
    pairs = {}
    for token, target in zip(*row[:2], strict=True):
        if token:
            pairs.setdefault(int(token) // 100, []).append((int(token), int(target)))
    return pairs


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_has_each_once_with_the_targets_of_its_answer(text, pack):
    tokens = ChatTokens(text, SEQ, 3, vocab_size=10_000, pack=pack, document_starts=pack)
    orders = []
    for epoch in (0, 1):
        rows = [tokens.sample(epoch, place) for place in range(tokens.samples)]
        orders.append([next(iter(parts(row))) for row in rows])
        conversations = [pair for row in rows for pair in parts(row).items()]
        assert sorted(conversation for conversation, _ in conversations) == list(range(1, 31))
        for conversation, pairs in conversations:
            ids, answers = text.chats[conversation - 1]
            expected = np.where(answers[1:], ids[1:], PADDING)
            assert pairs == list(zip(ids[:-1].tolist(), expected.tolist(), strict=True))
        assert all((row[1][row[0] == 0] == PADDING).all() for row in rows)
    assert orders[0] != orders[1]
    if pack:
        assert tokens.samples < 30 * 0.8


def test_longer_ones_are_cut_and_said():
    text = ChatText(Path("a.jsonl"), [chat(1, 4, 4), chat(2, 4, 5), chat(3, 4, 9), chat(4, 9, 2)])
    cut = text.cut(7)  # inputs
    assert [len(conversation.tokens) for conversation in cut.chats] == [8, 8, 8]
    note = text.note(7)
    assert note == (
        "4 conversations, 20 of 41 tokens are answers; 3 are longer than --seq_length 7 (the longest 12): what is "
        "beyond is cut; 1 have no answer left, and are left out"
    )
    assert text.note(12) == "4 conversations, 20 of 41 tokens are answers"
    with pytest.raises(DataError, match="--seq_length 3"):
        text.cut(3)


def test_a_token_that_the_vocabulary_lacks(text):
    with pytest.raises(DataError, match=r"a.jsonl"):
        ChatTokens(text, SEQ, 0, vocab_size=3000)
