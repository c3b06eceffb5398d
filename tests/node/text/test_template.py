"""Messages into prompts: strict templates, loose ones, none at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.errors import BadRequest
from omlx.node.text.template import normalised, render
from omlx.node.text.tokenizer import Tokenizer, load_tokenizer

LOOSE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
CHECKS = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning') }}
{%- endif %}
{%- if not loop.first and m.role == loop.previtem.role %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- endfor %}"""
STRICT = CHECKS + LOOSE
DEAF = LOOSE.replace("in messages", "in messages if m.role != 'system' or m == messages[0]")


@pytest.fixture
def with_template(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[str | None], Tokenizer]:
    def load(template: str | None) -> Tokenizer:
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(tiny("tiny-llama") / name, tmp_path)
        config = json.loads((tiny("tiny-llama") / "tokenizer_config.json").read_text())
        config.pop("chat_template")
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    return load


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role[0]}{n}"} for n, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "loose", "strict"),
    [
        (("user", "developer", "user"), "[user]u0[system]d1[user]u2", "[system]d1[user]u0\n\nu2"),
        (("system", "system", "user"), "[system]s0[system]s1[user]u2", "[system]s0\n\ns1[user]u2"),
        (("user", "user"), "[user]u0[user]u1", "[user]u0\n\nu1"),
        (("developer", "user"), "[system]d0[user]u1", "[system]d0[user]u1"),
    ],
)
def test_turns_are_tried_as_they_are_and_then_in_a_stricter_form(
    roles: tuple[str, ...], loose: str, strict: str, with_template: Callable[[str | None], Tokenizer]
) -> None:
    assert render(with_template(LOOSE), turns(*roles), {}) == loose + "[assistant]"
    assert render(with_template(STRICT), turns(*roles), {}) == strict + "[assistant]"


def test_a_later_system_message_that_the_template_leaves_out_goes_to_the_front(
    with_template: Callable[[str | None], Tokenizer],
) -> None:
    prompt = render(with_template(DEAF), turns("system", "user", "system"), {})
    assert prompt == "[system]s0\n\ns2[user]u1[assistant]"


def test_a_refusal_of_both_forms_says_what_the_template_says(
    with_template: Callable[[str | None], Tokenizer],
) -> None:
    tokenizer = with_template("{{ raise_exception('Only cats may speak') }}")
    with pytest.raises(BadRequest, match="Only cats may speak") as raised:
        render(tokenizer, turns("user"), {})
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{% for x in 5 %}{% endfor %}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(
    template: str, with_template: Callable[[str | None], Tokenizer]
) -> None:
    with pytest.raises(BadRequest, match="chat template refuses"):
        render(with_template(template), turns("user"), {})


def test_without_a_template_the_other_route_is_named(
    with_template: Callable[[str | None], Tokenizer],
) -> None:
    with pytest.raises(BadRequest, match=r"no chat template.*/v1/completions"):
        render(with_template(None), turns("user"), {})


def test_template_arguments_are_passed_on_but_cannot_steer_the_rendering(
    with_template: Callable[[str | None], Tokenizer],
) -> None:
    tokenizer = with_template("{{ mood }}|{{ messages[0].content }}|{{ add_generation_prompt }}")
    assert render(tokenizer, turns("user"), {"mood": "calm"}) == "calm|u0|True"
    for name in ("chat_template", "tokenize", "add_generation_prompt", "messages"):
        with pytest.raises(BadRequest, match=name) as raised:
            render(tokenizer, turns("user"), {name: "x"})
        assert raised.value.param == f"chat_template_kwargs.{name}"


def test_joining_keeps_reasoning_and_leaves_tool_results_apart() -> None:
    joined = normalised(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "c", "reasoning_content": "s"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "system", "content": "late"},
        ]
    )
    assert joined == [
        {"role": "system", "content": "late"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\nc", "reasoning_content": "r\n\ns"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
