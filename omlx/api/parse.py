"""From a body's bytes to a checked request, or to one BadRequest that names the field."""

import json
import re
from collections.abc import Iterator
from typing import NoReturn, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from omlx.errors import BadRequest

Schema = TypeVar("Schema", bound=BaseModel)
Path: TypeAlias = tuple[str | int, ...]

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_NAME = 200
OWN_CODES = frozenset({"unsupported_parameter"})
"""Error types that our schemas raise and that clients see as they are."""


async def parse_body(request: Request, schema: type[Schema]) -> Schema:
    """The request's body as `schema`.

    Raises BadRequest: not UTF-8, not JSON, nested too deep, half a surrogate pair in a string, or a
    field that the schema does not take.
    """
    fields = _decode(await request.body())
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error.errors(include_url=False, include_context=False)[0]) from None


def _decode(body: bytes) -> object:
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise BadRequest(message, code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body's JSON is nested too deep", code="invalid_json") from None
    except ValueError:
        raise BadRequest("the body's JSON has a number that is too long", code="invalid_json") from None
    if SURROGATE_ESCAPE.search(body):
        for path in _broken_strings(fields):
            name = dotted(path) or "body"
            raise BadRequest(f"{name}: half a surrogate pair is not text", param=name, code="invalid_text")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body is not JSON: {name} is no JSON number", code="invalid_json")


def _broken_strings(value: object) -> Iterator[Path]:
    """The paths of all strings that hold a surrogate without its other half; of a key, its object's."""
    # A stack of our own: the decoder nests deeper than Python functions may call each other.
    stack: list[tuple[Path, object]] = [((), value)]
    while stack:
        path, item = stack.pop()
        match item:
            case str() if _is_broken(item):
                yield path
            case dict() if any(_is_broken(key) for key in item):
                yield path
            case dict():
                stack.extend(((*path, key), inner) for key, inner in item.items())
            case list():
                stack.extend(((*path, index), inner) for index, inner in enumerate(item))


def _is_broken(text: str) -> bool:
    # The decoder has joined the pairs, so what is left in this range stands alone.
    return any("\ud800" <= character <= "\udfff" for character in text)


def _bad_request(error: ErrorDetails) -> BadRequest:
    # Parts in angle brackets name a branch of a union, which no client has written.
    path = tuple(part for part in error["loc"] if not str(part).startswith("<"))
    name = dotted(path) or "body"
    match error["type"]:
        case "extra_forbidden":
            return BadRequest(f"{name}: unknown field", param=name, code="unknown_parameter")
        case "missing":
            return BadRequest(f"{name}: this field is required", param=name, code="missing_parameter")
        case kind:
            code = kind if kind in OWN_CODES else "invalid_value"
            return BadRequest(f"{name}: {error['msg']}", param=name, code=code)


def dotted(path: Path) -> str:
    """`("messages", 0, "content")` as `messages[0].content`; cut when absurdly long."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")[:MAX_NAME]
