"""Messages to the prompt's text, by the model's own chat template."""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from omlx.errors import BadRequest
from omlx.node.text.tokenizer import RESERVED_KWARGS, Tokenizer

Turn = Mapping[str, str]
"""One message as templates know it: role, content, and name or reasoning_content where there is one."""

# A template refuses by raising TemplateError; its expressions fail like Python's.
_REFUSALS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def render(tokenizer: Tokenizer, turns: Sequence[Turn], kwargs: Mapping[str, object]) -> str:
    """The prompt, open for the assistant's answer; `developer` is another word for `system`.

    The turns are tried as they are, and in a stricter form if the template refuses them or leaves a later
    system message out. Raises BadRequest with the template's own message if it refuses both.
    """
    if not tokenizer.has_template:
        raise BadRequest(
            "this model has no chat template, so it cannot chat; /v1/completions works with it",
            param="model",
            code="no_chat_template",
        )
    for name in sorted(RESERVED_KWARGS & kwargs.keys()):
        raise BadRequest(
            f"{name} is not an argument of the chat template", param=f"chat_template_kwargs.{name}"
        )
    plain = [{**turn, "role": "system"} if turn["role"] == "developer" else {**turn} for turn in turns]
    try:
        prompt = tokenizer.render(plain, kwargs)
        if all(turn["content"].strip() in prompt for turn in plain[1:] if turn["role"] == "system"):
            return prompt
    except _REFUSALS:
        pass  # the stricter form may do, and its refusal says what is still wrong
    try:
        return tokenizer.render(normalised(plain), kwargs)
    except _REFUSALS as error:
        raise BadRequest(f"the model's chat template refuses: {error}", param="messages") from error


def normalised(turns: Sequence[Turn]) -> list[Turn]:
    """One system message in front, and no role twice in a row; what is joined keeps a blank line between.

    Tool results stay apart, since each answers a call of its own.
    """
    first = [turn for turn in turns if turn["role"] == "system"]
    joined: list[Turn] = []
    for turn in [*first, *(turn for turn in turns if turn["role"] != "system")]:
        if joined and joined[-1]["role"] == turn["role"] != "tool":
            joined[-1] = _join(joined[-1], turn)
        else:
            joined.append(turn)
    return joined


def _join(first: Turn, second: Turn) -> Turn:
    both = {
        key: "\n\n".join(turn[key] for turn in (first, second) if turn.get(key))
        for key in ("content", "reasoning_content")
        if key in first or key in second
    }
    return {**first, **both}
