"""Chat templates in the sandbox of Jinja, which see what ``apply_chat_template`` of `transformers` (5.24) shows them.

But for the date: ``strftime_now`` is not defined, because data depend on no day. Templates that ask whether it is have
a date of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmm.errors import DataError

BEGIN, END = "\ufdd0", "\ufdd1"  # no characters (Unicode keeps them for programs): where {% generation %} was


def compile_template(template: str) -> Callable[..., str]:
    """A function that makes a text of what the template asks for by name; a block ``{% generation %}`` stands between
    `BEGIN` and `END` in it. Both raise DataError: it is no Jinja, or does not take what it is given."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise DataError(f"the chat template is no Jinja: {_one_line(error)}") from None

    def render(**variables: object) -> str:
        try:
            return compiled.render(**variables)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise DataError(f"the chat template does not take it: {_one_line(error)}") from None

    return render


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: what a model writes."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Any) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **flags: Any) -> str:
    """Jinja's own escapes what is HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **flags)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    return line + " ".join(str(error).split())
