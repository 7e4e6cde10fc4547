"""Conversations to train on, from JSON lines: of each token, whether a model learns to write it.

A line is ``{"messages": [{"role": "user", "content": "…"}, …]}``, or a prompt with what answers it: ``{"prompt": "…",
"answer": "…"}`` (also ``completion``, ``response``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import ANSWERS, MARKS, ROLES, ChatTemplate, Message, Span
from mmm.data.text.corpus import check_is_file
from mmm.data.text.formats import check_text_file
from mmm.errors import DataError
from mmm.outside import parse_json, short

MESSAGES, PROMPT = "messages", "prompt"
COMPLETIONS = ("answer", "completion", "response")


class Conversation(NamedTuple):
    """where: file and line, for messages."""

    where: str
    messages: list[Message]


class ChatArrays(NamedTuple):
    """tokens: (tokens,) int64. answers: (tokens,) bool, whether a token is of an answer."""

    tokens: np.ndarray
    answers: np.ndarray


def is_chat_file(path: Path) -> bool:
    """Whether a file is JSON lines whose first has messages, or a prompt. A file that is none, or cannot be read, is
    left to those who read texts."""
    try:
        if not path.is_file() or not check_text_file(path, str(path)):
            return False
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), b"")
        first = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except (DataError, OSError):
        return False
    except ValueError:
        return True  # `read_chats` says what is wrong
    return MESSAGES in first or PROMPT in first


def read_chats(path: Path) -> list[Conversation]:
    """The conversations of a file.

    Raises:
        DataError: a line is none, by file and line.
    """
    name = f"--text {path}"
    try:
        check_is_file(path, name)
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None
            found.append(Conversation(where, _checked(_messages(record, where), where)))
    return found


def _messages(record: dict[str, Any], where: str) -> Any:
    if MESSAGES in record:
        return record[MESSAGES]
    if PROMPT not in record:
        raise DataError(f"{where} has neither {MESSAGES} nor {PROMPT}")
    answers = [name for name in COMPLETIONS if name in record]
    if len(answers) != 1:
        there = f"has {' and '.join(answers)}: give one" if answers else f"has none of {', '.join(COMPLETIONS)}"
        raise DataError(f"{where} {there}, the answer to its {PROMPT}")
    return [{"role": "user", "content": record[PROMPT]}, {"role": ANSWERS, "content": record[answers[0]]}]


def _checked(messages: Any, where: str) -> list[Message]:
    """Raises DataError: they are no conversation, or one without an answer."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: {MESSAGES} is {short(messages)}, which is no list of objects with role and content")
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(
                f"{where}: message {number} has the role {short(role)}, which is none of {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise DataError(f"{where}: message {number} has the content {short(content)}, which is no text")
        if MARKS.search(content):
            raise DataError(f"{where}: message {number} has U+FDD0 or U+FDD1, which are no characters")
        if role == ANSWERS and not content.strip():
            raise DataError(f"{where}: message {number} is an empty answer")
    if all(message["role"] != ANSWERS for message in messages):
        raise DataError(f"{where} has no answer: no message has the role {ANSWERS}")
    return messages


def rendered(chat: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
    """As `ChatTemplate.text_and_answers`; its errors name file and line."""
    try:
        text, answers = template.text_and_answers(chat.messages)
    except DataError as error:
        raise DataError(f"{chat.where}: {error}") from None
    if all(end <= begin for begin, end in answers):
        raise DataError(f"{chat.where}: the chat template marks nothing in it as an answer")
    return text, answers


def encode_chat(chat: Conversation, template: ChatTemplate, tokenizer: Tokenizer) -> ChatArrays:
    """The tokens of a conversation, and which are answers'.

    Raises:
        DataError: an answer does not begin or end between two tokens; a character that the vocabulary lacks.
    """
    text, spans = rendered(chat, template)
    try:
        tokens = tokenizer.encode(text.encode()).astype(np.int64)
        answers = np.zeros(len(tokens), bool)
        for span in spans:
            begin, end = (_tokens_before(text[:edge], tokens, tokenizer) for edge in span)
            answers[begin:end] = True
    except UnicodeEncodeError:
        raise DataError(f"{chat.where}: half of a character, as \\ud800, stands in it") from None
    except DataError as error:
        raise DataError(f"{chat.where}: {error}") from None
    return ChatArrays(tokens, answers)


def _tokens_before(text: str, tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """How many of the tokens are those of a text that they begin with. Raises DataError: they begin otherwise."""
    before = tokenizer.encode(text.encode())
    if not np.array_equal(before, tokens[: len(before)]):
        raise DataError(
            f"a token lies across the edge of an answer, after {short(text[-20:])}: change the chat template, so that "
            "a special token or a line's end is there"
        )
    return len(before)
