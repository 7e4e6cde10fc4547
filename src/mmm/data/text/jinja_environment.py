"""Chat templates in the sandbox of Jinja. They see what ``apply_chat_template`` of `transformers` (5.24) shows them.

The one exception is ``strftime_now``, which is not defined: data must not depend on the day. Templates that ask whether
it is defined bring a date of their own.
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

# Around what {% generation %} writes. Unicode keeps these two for programs: they are not characters of any text.
BEGIN = "\ufdd0"
END = "\ufdd1"


def compile_template(template: str) -> Callable[..., str]:
    """Compile a template to a function that takes the template's variables by name and returns a text.

    What a block ``{% generation %}`` writes stands between `BEGIN` and `END` in that text.

    Raises:
        DataError: the template is not valid Jinja. The returned function raises it if the template refuses the
            variables.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise DataError(f"the chat template is not valid Jinja: {_one_line(error)}") from None

    def render(**variables: object) -> str:
        try:
            return compiled.render(**variables)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise DataError(f"the chat template does not take it: {_one_line(error)}") from None

    return render


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` around what a model writes."""

    # A set on the class, as Jinja has it.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_mark"), [], [], body)
        return block.set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **flags: Any) -> str:
    """The filter ``tojson``. Jinja's own would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **flags)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    return text
