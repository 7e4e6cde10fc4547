"""Reads conversations to train on from JSON lines, and says of each token whether a model learns to write it.

A line is ``{"messages": [{"role": "user", "content": "…"}, …]}``, or a prompt with its answer: ``{"prompt": "…",
"answer": "…"}`` (or ``completion``, or ``response``). Both may have ``system``, a message before all others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import ANSWERS, MARKS, ROLES, ChatTemplate, Message, Span
from mmm.data.text.formats import reading
from mmm.errors import DataError
from mmm.outside import open_file, parse_json, short

MESSAGES = "messages"
PROMPT = "prompt"
COMPLETIONS = ("answer", "completion", "response")
# Fields that no template here writes: a model would learn a conversation without them.
NOT_WRITTEN = ("tool_calls", "reasoning_content", "reasoning", "thinking")


class Conversation(NamedTuple):
    """A line of a file.

    Attributes:
        where: file and line, for messages.
        messages: the messages, in order.
    """

    where: str
    messages: list[Message]


class ChatArrays(NamedTuple):
    """A conversation in tokens.

    Attributes:
        tokens: (tokens,) int64.
        answers: (tokens,) bool, whether a token belongs to an answer.
    """

    tokens: np.ndarray
    answers: np.ndarray


def read_chats(path: Path) -> list[Conversation]:
    """Read the conversations of a file.

    Raises:
        DataError: a line is not a conversation; the message names file and line.
    """
    with reading(f"--text {path}"), open_file(path) as file:
        content = file.read()
    # Without the byte-order mark that some editors write.
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    chats = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--text {path}, line {line_number}"
        try:
            record = parse_json(line)
            chats.append(_conversation(record, where))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    return chats


def _conversation(record: dict[str, Any], where: str) -> Conversation:
    """Check and convert a line. Raises ValueError: it is not a conversation."""
    completions = [name for name in COMPLETIONS if name in record]
    if MESSAGES in record:
        messages = record[MESSAGES]
    elif PROMPT in record and len(completions) == 1:
        question = {"role": "user", "content": record[PROMPT]}
        answer = {"role": ANSWERS, "content": record[completions[0]]}
        messages = [question, answer]
    else:
        raise ValueError(
            f"it has neither {MESSAGES} nor {PROMPT} with one of {', '.join(COMPLETIONS)}; if its lines are texts, "
            f"prepare them by mmm tokens"
        )
    is_list = isinstance(messages, list)
    if not is_list or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{MESSAGES} is {short(messages)}, which is not a list of objects with role and content")
    system = record.get("system")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    for message_number, message in enumerate(messages, start=1):
        problem = _problem(message)
        if problem:
            raise ValueError(f"message {message_number} has {problem}")
    if all(message["role"] != ANSWERS for message in messages):
        raise ValueError(f"it has no answer to learn: no message has the role {ANSWERS}")
    if record.get("tools"):
        raise ValueError("its tools are not written into a text: train on conversations without them")
    # These mark answers in the text that a template writes.
    text = json.dumps(record, ensure_ascii=False)
    if MARKS.search(text):
        raise ValueError("it has U+FDD0 or U+FDD1, which are not characters")
    return Conversation(where, messages)


def _problem(message: Message) -> str:
    """What is wrong with a message; empty if nothing."""
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        return f"the role {short(role)}, which is none of {', '.join(ROLES)}"
    for name in NOT_WRITTEN:
        if message.get(name):
            return f"{name}, which is not written into a text: train on conversations without it"
    if not isinstance(content, str):
        return f"the content {short(content)}, which is not text"
    if role == ANSWERS and not content.strip():
        return "an empty answer"
    if message.get("weight", 1) != 1:
        return f"the weight {short(message['weight'])}: every answer is learned, so leave the conversation out"
    return ""


def rendered(chat: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
    """The text of a conversation and its answers, by `ChatTemplate.text_and_answers`.

    Raises:
        DataError: the template refuses the conversation, or marks no answer; the message names file and line.
    """
    try:
        text, answers = template.text_and_answers(chat.messages)
        if all(end <= begin for begin, end in answers):
            raise DataError("the chat template marks nothing in it as an answer")
    except DataError as error:
        raise DataError(f"{chat.where}: {error}") from None
    return text, answers


def encode_chat(chat: Conversation, template: ChatTemplate, tokenizer: Tokenizer) -> ChatArrays:
    """Encode a conversation, and mark the tokens of its answers.

    Raises:
        DataError: an answer begins or ends inside a token, or a character is not in the vocabulary.
    """
    text, spans = rendered(chat, template)
    try:
        tokens = tokenizer.encode(text.encode()).astype(np.int64)
        # (tokens,)
        answers = np.zeros(len(tokens), bool)
        for begin, end in spans:
            first = _tokens_before(text[:begin], tokens, tokenizer)
            last = _tokens_before(text[:end], tokens, tokenizer)
            answers[first:last] = True
    except UnicodeEncodeError:
        raise DataError(f"{chat.where}: it has half of a character, such as \\ud800") from None
    except DataError as error:
        raise DataError(f"{chat.where}: {error}") from None
    return ChatArrays(tokens, answers)


def _tokens_before(text: str, tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """How many of the tokens encode a text that they begin with.

    Raises:
        DataError: they begin with other tokens than those of the text, because one lies across its end.
    """
    before = tokenizer.encode(text.encode())
    if not np.array_equal(before, tokens[: len(before)]):
        raise DataError(
            f"a token lies across the edge of an answer, after {short(text[-20:])}: change the chat template, so that "
            "a special token or a line's end is there"
        )
    return len(before)
