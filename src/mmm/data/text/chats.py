"""Conversations to train on, from JSON lines: of each token, whether a model learns to write it.

A line is ``{"messages": [{"role": "user", "content": "…"}, …]}``, or a prompt with what answers it: ``{"prompt": "…",
"answer": "…"}`` (also ``completion``, ``response``). Beside either: ``system``, a message before all others, and
``tools``. A message's ``weight`` 0 keeps its tokens out of the loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import ANSWERS, MARKS, ROLES, WEIGHT, ChatTemplate, Message, Span, Tools
from mmm.data.text.formats import MESSAGES, PROMPT, reading
from mmm.errors import DataError
from mmm.outside import open_file, parse_json, short

COMPLETIONS = ("answer", "completion", "response")


class Conversation(NamedTuple):
    """A line of a file. where: file and line, for messages."""

    where: str
    messages: list[Message]
    tools: Tools = None


class ChatArrays(NamedTuple):
    """tokens: (tokens,) int64. answers: (tokens,) bool, whether a token is of an answer."""

    tokens: np.ndarray
    answers: np.ndarray


def read_chats(path: Path) -> list[Conversation]:
    """The conversations of a file.

    Raises:
        DataError: a line is none, by file and line.
    """
    with reading(f"--text {path}"), open_file(path) as file:
        lines = file.read().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    chats = []
    for index, line in enumerate(lines, start=1):
        if line.strip():
            where = f"--text {path}, line {index}"
            try:
                chats.append(_conversation(parse_json(line), where))
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None
    return chats


def _conversation(record: dict[str, Any], where: str) -> Conversation:
    """Raises ValueError: it is none."""
    answers = [name for name in COMPLETIONS if name in record]
    if MESSAGES in record:
        messages = record[MESSAGES]
    elif PROMPT in record and len(answers) == 1:
        messages = [{"role": "user", "content": record[PROMPT]}, {"role": ANSWERS, "content": record[answers[0]]}]
    else:
        raise ValueError(f"it has neither {MESSAGES} nor {PROMPT} with one of {', '.join(COMPLETIONS)}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{MESSAGES} is {short(messages)}, which is no list of objects with role and content")
    if record.get("system") is not None:
        messages = [{"role": "system", "content": record["system"]}, *messages]
    for index, message in enumerate(messages, start=1):
        problem = _problem(message)
        if problem:
            raise ValueError(f"message {index} has {problem}")
    if not any(message["role"] == ANSWERS and message.get(WEIGHT, 1) for message in messages):
        raise ValueError(f"it has no answer to learn: no message has the role {ANSWERS}, or each has weight 0")
    if not isinstance(record.get("tools"), list | None):
        raise ValueError(f"its tools are {short(record['tools'])}, which is no list")
    if MARKS.search(json.dumps(record, ensure_ascii=False)):
        raise ValueError("it has U+FDD0 or U+FDD1, which are no characters")
    return Conversation(where, messages, record.get("tools"))


def _problem(message: Message) -> str:
    """What is wrong with a message. One that only calls tools gets an empty content."""
    role = message.get("role")
    calls = message.get("tool_calls")
    if calls and message.get("content") is None:
        message["content"] = ""
    content = message.get("content")
    weight = message.get(WEIGHT, 1)
    if role not in ROLES:
        return f"the role {short(role)}, which is none of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"the content {short(content)}, which is no text"
    if role == ANSWERS and not content.strip() and not calls:
        return "an empty answer"
    if weight not in (0, 1):
        return f"the weight {short(weight)}, which is neither 0 nor 1"
    return ""


def rendered(chat: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
    """As `ChatTemplate.text_and_answers`; its errors name file and line.

    Raises:
        DataError: also where the template leaves out what a model is to learn.
    """
    try:
        text, answers = template.text_and_answers(chat.messages, chat.tools)
        if all(end <= begin for begin, end in answers):
            raise DataError("the chat template marks nothing in it as an answer")
        template.check_written(chat.messages, chat.tools, text)
    except DataError as error:
        raise DataError(f"{chat.where}: {error}") from None
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
        for begin, end in spans:
            first = _tokens_before(text[:begin], tokens, tokenizer)
            last = _tokens_before(text[:end], tokens, tokenizer)
            answers[first:last] = True
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
