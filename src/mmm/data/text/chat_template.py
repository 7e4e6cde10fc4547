"""Writes conversations as text by a chat template, and finds the answers in that text."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from mmm.checkpoint.model_metadata import ChatFormat
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import DataError

ROLES = ("system", "user", "assistant")
# The role whose turns a model learns.
ANSWERS = "assistant"
# Role and content.
Message = dict[str, Any]
# First character, and the one after the last.
Span = tuple[int, int]
# `BEGIN` and `END` of `mmm.data.text.jinja_environment`.
MARKS = re.compile("[\ufdd0\ufdd1]")
# The plain template, for tokenizers without one.
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
    """Writes conversations as text.

    Args:
        chat: the chat format.
        special: special tokens of the tokenizer, any of which may end an answer.

    Attributes:
        format: the chat format that the template was made from.

    Raises:
        DataError: the template is not valid Jinja.
    """

    def __init__(self, chat: ChatFormat, special: Collection[str] = ()) -> None:
        # Here: Jinja is imported only for conversations.
        from mmm.data.text.jinja_environment import compile_template

        self.format = chat
        self._render = compile_template(chat.template)
        ends = filter(None, [chat.special_tokens.get("eos_token"), *special])
        # "(?!)" is found nowhere.
        marks = "|".join(map(re.escape, ends)) or "(?!)"
        # The first of the special tokens that a text ends with. Line ends may stand between them, and after them.
        self._end = re.compile(rf"({marks})(?=({marks}|\s)*\Z)")

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of messages.

        Args:
            add_generation_prompt: whether the text ends with the beginning of an answer.

        Raises:
            DataError: the template refuses the messages.
        """
        if add_generation_prompt:
            return self._up_to_answer(messages)
        return self._text(messages)

    def end_of_answers(self) -> str:
        """The special token that the template ends an answer with; empty if there is none.

        Raises:
            DataError: the template refuses a plain conversation.
        """
        turns = [{"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}]
        match = self._end.search(self._text(turns))
        return match[1] if match else ""

    def text_and_answers(self, turns: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans of the answers to learn, each with the token that ends it.

        Answers are what stands in the template's blocks ``{% generation %}``. Without such blocks, an answer is the
        text that its message adds to that of the messages before it.

        Raises:
            DataError: the template refuses the messages, leaves one out or changes one; or the text up to an answer's
                begin or end depends on the messages after it.
        """
        marked = self._marked(turns)
        text = MARKS.sub("", marked)
        # Where the message before ends in the text.
        place = 0
        for index, turn in enumerate(turns, start=1):
            content = turn["content"].strip()
            # A template may move what the system says.
            moves = turn["role"] == "system"
            begin = text.find(content, 0 if moves else place)
            if begin < 0:
                raise DataError(f"the chat template leaves out, or changes, message {index} ({turn['role']})")
            if not moves:
                place = begin + len(content)
        if MARKS.search(marked):
            return text, _marked_spans(marked)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == ANSWERS]
        return text, [self._answer(turns, index, text) for index in answers]

    def _answer(self, turns: Sequence[Message], index: int, text: str) -> Span:
        """The span of a turn in the text of all turns."""
        before = self._up_to_answer(turns[:index])
        through = self._text(turns[: index + 1])
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template writes the text up to message {index + 1} differently if it ends there: "
                "mark the answers in it by {% generation %}"
            )
        begin = len(before)
        answer = through[begin:]
        return begin, begin + self._end_of_answer(answer)

    def _up_to_answer(self, turns: Sequence[Message]) -> str:
        """The text of turns, and what the template writes before any answer to them."""
        prompted = self._text(turns, add_generation_prompt=True)
        if prompted != self._text(turns):
            return prompted
        # The template has no generation prompt. Two answers have the text before them in common.
        texts = [self._text([*turns, {"role": ANSWERS, "content": answer}]) for answer in "ab"]
        common = os.path.commonprefix(texts)  # noqa: RUF071, characters are meant
        header = common[len(prompted) :]
        # In most vocabularies a space is part of the word after it.
        return prompted + header.rstrip(" ")

    def _end_of_answer(self, text: str) -> int:
        """Where an answer's last token ends. What follows it belongs to the template: no model generates it."""
        match = self._end.search(text)
        return match.end() if match else len(text)

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return MARKS.sub("", self._marked(messages, add_generation_prompt))

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text with marks around what blocks ``{% generation %}`` write."""
        return self._render(
            **self.format.special_tokens,
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own template or, if it has none, the plain one (`DEFAULT`).

    Raises:
        DataError: its template is not valid Jinja.
    """
    own = tokenizer.chat or ChatFormat()
    template = own.template or DEFAULT
    return ChatTemplate(replace(own, template=template), tokenizer.special)


def _marked_spans(text: str) -> list[Span]:
    """The spans between the first mark and the second, and so on, in the text without marks."""
    edges = []
    for n_removed, mark in enumerate(MARKS.finditer(text)):
        # Each mark before this one is a character that the text without marks does not have.
        edges.append(mark.start() - n_removed)
    begins = edges[::2]
    ends = edges[1::2]
    return list(zip(begins, ends, strict=True))
