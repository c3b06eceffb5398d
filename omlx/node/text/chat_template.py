"""A model's chat template, compiled: all that published templates use, and no way out of it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class ChatTemplate:
    """Safe to use from several threads. `names` are the special tokens that templates call by name."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def render(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """The prompt as text, open for the assistant's answer. `kwargs` go before the special tokens.

        Lets through whatever the template raises: jinja2.TemplateError, or what its expressions lead to.
        """
        names = {"tools": None, "documents": None, **self._names, **kwargs}
        return self._compiled.render(
            names, messages=[_turn(message) for message in messages], add_generation_prompt=True
        )

    @cached_property
    def _compiled(self) -> Template:
        # Not before it is asked for: a folder whose template is broken still completes prompts.
        return _room().from_string(self._source)


def _turn(message: Mapping[str, object]) -> dict[str, object]:
    """Templates test for a field by its presence; gpt-oss calls reasoning `thinking`."""
    turn = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in turn:
        turn.setdefault("thinking", turn["reasoning_content"])
    return turn


def _room() -> ImmutableSandboxedEnvironment:
    """What transformers documents for chat templates: block trimming, loop controls, and these names."""
    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    room.filters["tojson"] = _tojson
    room.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    return room


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (as Extension declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's, without names that would hide those of Python's own objects from the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args  # so that a template may write namespace(self=...)
        Namespace.__init__(self)
        for name, value in dict(*values, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
