"""Conversations as text, by a chat template, and where in that text the answers are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"  # the role whose turns a model learns
Message = dict[str, Any]  # role, content, and what else a template may ask for
Span = tuple[int, int]  # first character, and the one after the last
MARKS = re.compile("[\ufdd0\ufdd1]")  # `BEGIN` and `END` of `mmm.data.text.jinja_environment`
END_OF_TEXT = "\0"  # after an answer, where a tokenizer has no special tokens: no text has it
DEFAULT = """\
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant"] %}
{{- raise_exception("the plain template has no role " + message.role) }}
{%- endif %}
{{- message.role + ":\\n" + message.content | trim }}
{%- if message.role == "assistant" %}{{ eos_token }}{% endif %}
{{- "\\n\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "assistant:\\n" }}{% endif %}
"""


class ChatTemplate:
    """
    Attributes:
        format: that it was made of.

    Raises:
        DataError: the template is no Jinja.
    """

    def __init__(self, chat: ChatFormat) -> None:
        from mmm.data.text.jinja_environment import compile_template  # with it comes Jinja

        self.format = chat
        self._render = compile_template(chat.template)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of messages.

        Args:
            add_generation_prompt: with what an answer begins with, after them.

        Raises:
            DataError: the template does not take them.
        """
        return MARKS.sub("", self._marked(messages, add_generation_prompt))

    def text_and_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and of each answer in it where it is: what the model is to write, the token that
        ends it included. By the blocks ``{% generation %}``; where there are none, of which text comes with it.

        Raises:
            DataError: the template does not take the messages, or leaves one out; or what is before an answer, or its
                end, is another text with the messages after it than without them.
        """
        marked = self._marked(messages)
        text = MARKS.sub("", marked)
        for number, message in enumerate(messages, start=1):
            if message["content"].strip() not in text:
                raise DataError(f"the chat template leaves out, or changes, message {number} ({message['role']})")
        if MARKS.search(marked):
            return text, _marked_spans(marked)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS:
                begin = self.render(messages[:number], add_generation_prompt=True)
                end = self.render(messages[: number + 1])
                if not (text.startswith(end) and end.startswith(begin)):
                    raise DataError(
                        f"the chat template writes what is up to message {number + 1} otherwise where it ends there: "
                        "mark the answers in it by {% generation %}"
                    )
                spans.append((len(begin), len(begin) + self._end_of_answer(end[len(begin) :])))
        return text, spans

    def _end_of_answer(self, text: str) -> int:
        """Where an answer's last token ends: a line end after it is the template's, and nobody generates it."""
        eos = self.format.special_tokens.get("eos_token")
        return text.rfind(eos) + len(eos) if eos and eos in text else len(text)

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        given = {**self.format.special_tokens, "messages": messages, "tools": None, "documents": None}
        return self._render(**given, add_generation_prompt=add_generation_prompt)


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own, or else a plain one (`DEFAULT`). Raises DataError: it is no Jinja."""
    own = tokenizer.chat or ChatFormat()
    if own.template:
        return ChatTemplate(own)
    tokens = dict(own.special_tokens)
    if "eos_token" not in tokens and tokenizer.kind in ("bytes", "chars"):
        tokens["eos_token"] = END_OF_TEXT if _has_end(tokenizer) else ""
    return ChatTemplate(ChatFormat(DEFAULT, tokens))


def _has_end(tokenizer: Tokenizer) -> bool:
    try:
        return len(tokenizer.encode(END_OF_TEXT.encode())) == 1
    except DataError:
        return False


def _marked_spans(text: str) -> list[Span]:
    """Between the first mark and the second, and so on, in the text without marks."""
    edges = [mark.start() - removed for removed, mark in enumerate(MARKS.finditer(text))]
    return list(zip(edges[::2], edges[1::2], strict=True))
