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
Tools = list[Any] | None  # descriptions of what the model may call, as the template takes them
Span = tuple[int, int]  # first character, and the one after the last
# What nobody may leave out in silence: a model would learn a conversation without it.
WRITTEN = {"content", "reasoning_content", "reasoning", "thinking", "tool_calls"}
WEIGHT = "weight"  # of a message, 0 or 1: whether a model learns it
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
        return self._text(messages, None, add_generation_prompt)

    def text_and_answers(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """The text of a conversation, and of each answer to learn where it is: what the model is to write, the token
        that ends it included. By the blocks ``{% generation %}``; where there are none, of which text comes with it.

        Raises:
            DataError: the template does not take the messages, or changes one; or what is before an answer, or its end,
                is another text with the messages after it than without them.
        """
        turns = [{name: value for name, value in message.items() if name != WEIGHT} for message in messages]
        weights = [message.get(WEIGHT, 1) for message in messages if message["role"] == ANSWERS]
        marked = self._marked(turns, tools)
        text = MARKS.sub("", marked)
        for index, turn in enumerate(turns, start=1):
            if turn["content"].strip() not in text:
                raise DataError(f"the chat template leaves out, or changes, message {index} ({turn['role']})")
        if MARKS.search(marked):
            spans = _marked_spans(marked)
            if all(weights):
                return text, spans
        else:
            answers = [index for index, turn in enumerate(turns) if turn["role"] == ANSWERS]
            spans = [self._answer(turns, tools, index, text) for index in answers]
        if len(spans) != len(weights):
            raise DataError(
                f"the chat template marks {len(spans)} texts in {len(weights)} answers: weight 0 cannot be kept"
            )
        return text, [span for span, weight in zip(spans, weights, strict=True) if weight]

    def check_written(self, messages: Sequence[Message], tools: Tools, text: str) -> None:
        """Check that the template writes each of `WRITTEN`: without it, the text is another one.

        Args:
            text: of these messages.

        Raises:
            DataError: it leaves one out.
        """
        if tools and self._writes(text, messages, None):
            raise DataError("the chat template leaves out tools of the conversation")
        for index, message in enumerate(messages):
            for name, value in message.items():
                if name not in WRITTEN or not value or not str(value).strip():
                    continue
                shorter = {key: value for key, value in message.items() if key != name}
                shorter.setdefault("content", "")
                if self._writes(text, [*messages[:index], shorter, *messages[index + 1 :]], tools):
                    raise DataError(f"the chat template leaves out {name} of message {index + 1} ({message['role']})")

    def _writes(self, text: str, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template makes this text of these messages."""
        try:
            return self._text(messages, tools) == text
        except DataError:
            return False

    def _answer(self, turns: Sequence[Message], tools: Tools, index: int, text: str) -> Span:
        """Where in the text of all turns the one of this index is."""
        begin = self._text(turns[:index], tools, add_generation_prompt=True)
        end = self._text(turns[: index + 1], tools)
        if not (text.startswith(end) and end.startswith(begin)):
            raise DataError(
                f"the chat template writes what is up to message {index + 1} otherwise where it ends there: "
                "mark the answers in it by {% generation %}"
            )
        return len(begin), len(begin) + self._end_of_answer(end[len(begin) :])

    def _text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        return MARKS.sub("", self._marked(messages, tools, add_generation_prompt))

    def _end_of_answer(self, text: str) -> int:
        """Where an answer's last token ends: a line end after it is the template's, and nobody generates it."""
        eos = self.format.special_tokens.get("eos_token")
        return text.rfind(eos) + len(eos) if eos and eos in text else len(text)

    def _marked(self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = False) -> str:
        return self._render(
            **self.format.special_tokens,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own, or else a plain one (`DEFAULT`). Raises DataError: it is no Jinja."""
    own = tokenizer.chat or ChatFormat()
    if own.template:
        return ChatTemplate(own)
    tokens = dict(own.special_tokens)
    if "eos_token" not in tokens and tokenizer.splittable:  # bytes, or characters
        try:
            tokenizer.encode(END_OF_TEXT.encode())
            tokens["eos_token"] = END_OF_TEXT
        except DataError:  # none of the characters
            tokens["eos_token"] = ""
    return ChatTemplate(ChatFormat(DEFAULT, tokens))


def _marked_spans(text: str) -> list[Span]:
    """Between the first mark and the second, and so on, in the text without marks."""
    edges = [mark.start() - removed for removed, mark in enumerate(MARKS.finditer(text))]
    return list(zip(edges[::2], edges[1::2], strict=True))
