"""The building blocks of the OpenAI schemas: numbers, stop strings, and fields that we do not serve."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_BIAS = 100.0


class Strict(BaseModel):
    """Numbers are numbers ("5" is not), and a field that is not in the schema is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _whole(value: object) -> object:
    # JSON has one kind of number: 1e3 and 8.0 are whole, 1.5 is left for the strict check to refuse.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


def only(*neutral: object, because: str) -> AfterValidator:
    """Takes null and the values that ask for nothing; refuses any other one as unsupported."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            message = "this value is not supported: {because}"
            raise PydanticCustomError("unsupported_parameter", message, {"because": because})
        return value

    return AfterValidator(check)


NoTools = Annotated[Any, only([], because="this server does not offer tools to the model yet")]
NoToolChoice = Annotated[
    Any, only("none", "auto", because="this server does not offer tools to the model yet")
]
Ignored = Annotated[Any, Field(repr=False)]


def _no_tool_role(role: str) -> str:
    if role in {"tool", "function"}:
        raise PydanticCustomError(
            "unsupported_parameter", "this server does not offer tools to the model yet"
        )
    return role


Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool", "function"], AfterValidator(_no_tool_role)
]


def _string_or_list(value: object) -> str | None:
    match value:
        case str():
            return "<string>"
        case list():
            return "<list>"
        case _:
            return None


StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")] | Annotated[list[StopString], Field(max_length=4), Tag("<list>")],
    Discriminator(
        _string_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of up to 4 strings",
    ),
]


def _text_only(value: object) -> object:
    if value != "text":
        raise PydanticCustomError("unsupported_parameter", "only parts of type 'text' are supported")
    return value


class TextPart(Strict):
    """One part of a message's content; the parts' texts are joined in order."""

    type: Annotated[Any, AfterValidator(_text_only)]
    text: str
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Tag("<list>")],
    Discriminator(
        _string_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


def _biases(value: dict[str, float]) -> dict[str, float]:
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise PydanticCustomError("token_id", 'keys should be token ids such as "1734"')
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError("bias", "values should be between -100 and 100")
    return value


LogitBias = Annotated[dict[str, float], AfterValidator(_biases)]
