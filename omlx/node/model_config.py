"""config.json of a model folder: the numbers that the byte arithmetic needs, checked once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omlx.errors import BadModel

# mlx-lm serves the name on the left by its model file on the right.
SERVED_AS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "mistral": "llama",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "xverse": "llama",
}

# What mlx-lm assumes where config.json is silent; published folders do leave these out.
DEFAULTS: dict[str, dict[str, int]] = {
    "cohere2": {"head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "deepseek_v32": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {
        "global_head_dim": 512,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
    },
    "gpt_oss": {
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
    },
    "qwen3_5": {
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 192,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3_next": {"full_attention_interval": 4},
}

# mlx-lm's wrapper of the multimodal Gemma 3 fills these in before the text model's own defaults.
WRAPPER_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4},
}

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
CONTEXTS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "model_max_length",
    "n_ctx",
    "seq_length",
)
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checked config.json. `text` is what describes the language model: nested fields laid on top."""

    path: Path
    raw: Mapping[str, object]
    text: Mapping[str, object]
    model_type: str
    family: str
    """The mlx-lm model file that serves the language model."""
    num_layers: int

    def count(self, *names: str) -> int | None:
        """The first of `names` that is there; None if none is.

        Raises BadModel when it is not a whole number of zero or more.
        """
        return _count(self.path, self.text, names)

    def need(self, *names: str) -> int:
        """Like `count`, but missing or zero raises BadModel too: the bytes depend on it."""
        value = self.count(*names)
        if not value:
            raise BadModel(f"{self.path}: {names[0]} is missing or 0, so the bytes it needs are unknown")
        return value

    def names(self, field: str) -> tuple[str, ...] | None:
        """A list of words with one entry a layer, e.g. `layer_types`; None if it is not there.

        Raises BadModel when it is something else or of another length than the layers.
        """
        value = self.text.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise BadModel(f"{self.path}: {field} must be a list of strings")
        if len(value) != self.num_layers:
            raise BadModel(f"{self.path}: {field} has {len(value)} entries for {self.num_layers} layers")
        return tuple(value)

    @property
    def context_tokens(self) -> int | None:
        """The longest sequence the config names; None where it names none (recurrent models do not)."""
        return self.count(*CONTEXTS) or None


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises BadModel that names the file: no folder, no file, not JSON, no model_type, no layer count.
    """
    if not folder.exists():
        raise BadModel(f"{folder}: no such model folder")
    if not folder.is_dir():
        raise BadModel(f"{folder}: not a folder; name the folder that holds config.json")
    path = folder / "config.json"
    raw = read_json_object(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise BadModel(f"{path}: model_type is missing; it says which architecture this is")
    nested = raw.get("text_config")
    inner: Mapping[str, object] = nested if isinstance(nested, dict) else {}
    inner_type = inner.get("model_type")
    named = inner_type if isinstance(inner_type, str) and inner_type else model_type
    family = SERVED_AS.get(named, named)
    text: dict[str, object] = {}
    for layer in (DEFAULTS.get(family, {}), WRAPPER_DEFAULTS.get(model_type, {}), raw, inner):
        text |= {name: value for name, value in layer.items() if value is not None}
    layers = _count(path, text, LAYER_COUNTS)
    if not layers:
        raise BadModel(f"{path}: num_hidden_layers is missing or 0; without it the model cannot be laid out")
    if layers > MOST_LAYERS:
        raise BadModel(f"{path}: num_hidden_layers is {layers}, more than any model has ({MOST_LAYERS})")
    return ModelConfig(
        path=path,
        raw=MappingProxyType(raw),
        text=MappingProxyType(text),
        model_type=model_type,
        family=family,
        num_layers=layers,
    )


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises BadModel that names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise BadModel(f"{path} is missing; download the model again") from error
    except OSError as error:
        raise BadModel(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadModel(f"{path}: not UTF-8; download it again") from error
    except json.JSONDecodeError as error:
        raise BadModel(f"{path}, line {error.lineno}: not JSON ({error.msg}); download it again") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path}: not usable JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def _count(path: Path, fields: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadModel(f"{path}: {name} is {value!r}, not a whole number of zero or more")
        return value
    return None
