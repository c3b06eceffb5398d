"""A small byte-level BPE tokenizer with a chat template that knows tools and thinking."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 768
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<pad>",
    "<unk>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CORPUS = """
The quick brown fox jumps over the lazy dog. A server keeps the model in memory and answers
requests one token at a time. When two prompts start with the same words, the keys and values
of the shared prefix are computed once and used again. A cache on disk lets the work survive
a restart. The user asks a question, the assistant thinks about it, calls a tool when it needs
one, and then gives the answer. What is the weather in Paris today? It is sunny, 21 degrees.
def add(a, b): return a + b
for i in range(10): print(i, i * i)
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
import json, sys; value = json.loads(sys.stdin.read()); print(value["name"])
0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024 3.14 -1
Hello! How are you? I am fine, thank you. Please write a short story about a small robot.
Once upon a time there was a little robot who lived in a house near the sea. Every morning
it went out to look at the water and to count the boats. One day a storm came, and the robot
helped the people to bring the boats home. They were happy, and the robot was happy too.
"""

TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each call return <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}<|im_start|>system
{{ m.content }}<|im_end|>
{% elif m.role == 'user' %}<|im_start|>user
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type in ('image', 'image_url') or 'image' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.content %}{{ m.content }}{% endif %}
{%- for tool_call in m.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {% if tool_call.arguments is string -%}
{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def train() -> Tokenizer:
    """Exactly VOCAB entries: a random model may pick any id, so each must have a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKS),
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
    )
    tokenizer.train_from_iterator([CORPUS] * 2, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    left = VOCAB - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{i}|>", normalized=False, special=True) for i in range(left)]
    )
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    train().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "chat_template": TEMPLATE,
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 3})
