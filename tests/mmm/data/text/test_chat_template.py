"""Conversations as text: what templates see, where answers are, what is refused."""

import pytest

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import ByteTokenizer
from mmm.data.text.chat_template import DEFAULT, ChatTemplate, chat_template_of
from mmm.data.text.tokenizer import CharTokenizer
from mmm.errors import DataError

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
    text, found = answers(CHATML, {"eos_token": "<|im_end|>"})
    assert found == ["1<|im_end|>", "2<|im_end|>"]
    assert text.startswith("<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n")
    assert answers(CHATML, {})[1] == ["1<|im_end|>\n", "2<|im_end|>\n"]  # nobody knows which token ends it
    assert answers(LLAMA_2)[1] == [" 1 </s>", " 2 </s>"]


def test_generation_blocks():
    text, found = answers(MARKED)
    assert found == ["1</s>", "2</s>"]
    assert text == "<q>one?</q><a>1</s></a><q>two?</q><a>2</s></a>"


def test_the_plain_template():
    text, found = answers(DEFAULT, {"eos_token": "\0"})
    assert text == "user:\none?\n\nassistant:\n1\0\n\nuser:\ntwo?\n\nassistant:\n2\0\n\n"
    assert found == ["1\0", "2\0"]
    assert chat_template_of(ByteTokenizer()).format == ChatFormat(DEFAULT, {"eos_token": "\0"})
    assert chat_template_of(CharTokenizer("a\0")).format.special_tokens == {"eos_token": "\0"}
    assert chat_template_of(CharTokenizer("ab")).format.special_tokens == {"eos_token": ""}
    tokenizer = ByteTokenizer()
    tokenizer.chat = ChatFormat("", {"eos_token": "</s>"})
    assert chat_template_of(tokenizer).render(TURNS[:2]) == "user:\none?\n\nassistant:\n1</s>\n\n"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{% for", TURNS, "line 1"),
        (FORGETFUL, TURNS, "message 2"),
        (LLAMA_2, [{"role": "tool", "content": "x"}, *TURNS], "does not take it: no role tool"),
        ("{{ messages[0].content }}", TURNS, r"message 2"),
        ("{{ messages[9].content.x }}", TURNS, "does not take it: "),
        ("{{ strftime_now('%d') }}", TURNS, "'strftime_now' is undefined"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", TURNS, "is unsafe"),
        ("{{ messages.append(1) }}", TURNS, "is not safely callable|unsafe"),
    ],
)
def test_refused(template, messages, said):
    with pytest.raises(DataError, match=said):
        answers(template, messages=messages)


def test_json_is_written_as_it_is():
    assert ChatTemplate(ChatFormat("{{ {'a': '<é>'} | tojson }}")).render([]) == '{"a": "<é>"}'
