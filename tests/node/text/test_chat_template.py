"""Chat templates: what published ones use works, and what reaches for more is refused."""

import re

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from omlx.node.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def rendered(source: str, *messages: dict[str, object], **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or (USER,), kwargs)


def test_a_template_calls_special_tokens_by_name_and_a_client_may_give_others() -> None:
    assert rendered("{{ bos_token }}{{ messages[0].content }}") == "<s>hi"
    assert rendered("{{ bos_token }}", bos_token="<b>") == "<b>"


def test_the_answer_is_open_and_there_are_no_tools_or_documents() -> None:
    source = "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} {{ other is defined }}"
    assert rendered(source) == "True True True False"


def test_a_block_on_a_line_of_its_own_leaves_no_line() -> None:
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loops_can_be_left_and_skipped() -> None:
    source = (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}"
    )
    assert rendered(source + "{{ n }}{% endfor %}") == "02"


def test_json_keeps_letters_and_signs_as_they_are() -> None:
    assert rendered("{{ x | tojson }}", x={"b": "é<'>", "a": None}) == '{"b": "é<\'>", "a": null}'
    assert (
        rendered("{{ x | tojson(indent=1, sort_keys=true) }}", x={"b": 1, "a": 2})
        == '{\n "a": 2,\n "b": 1\n}'
    )
    assert (
        rendered("{{ x | tojson(separators=(',', ':'), ensure_ascii=true) }}", x={"é": 1}) == '{"\\u00e9":1}'
    )


def test_today_is_told_in_the_wanted_form() -> None:
    assert re.fullmatch(r"\d\d\d\d-\d\d-\d\d", rendered("{{ strftime_now('%Y-%m-%d') }}"))


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match="no such role"):
        rendered("{{ raise_exception('no such role') }}")


def test_what_marks_an_answer_for_training_leaves_no_trace() -> None:
    assert rendered("a{% generation %}{{ messages[0].content }}{%- endgeneration %}z") == "ahiz"


def test_an_absent_field_is_undefined_and_reasoning_goes_by_both_of_its_names() -> None:
    fields = "{{ m.thinking is defined }}{{ m.thinking }}{{ m.reasoning_content }};"
    source = "{% for m in messages %}" + fields + "{% endfor %}"
    told = rendered(source, {**USER, "reasoning_content": None}, {**USER, "reasoning_content": "why"})
    assert told == "False;Truewhywhy;"


def test_a_namespace_outlives_a_loop() -> None:
    source = (
        "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    )
    assert rendered(source + "{{ ns.n }}{{ ns.self }}") == "11"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__class__=1) }}",
    ],
)
def test_there_is_no_way_out(source: str) -> None:
    with pytest.raises(SecurityError):
        rendered(source)
