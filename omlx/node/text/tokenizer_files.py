"""A tokenizer out of a model folder's files: what they say, and the vocabulary with its added tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from omlx.errors import BadModel

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer_config.json may name; others end in _token, too."""
GENERIC = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
"""Class names that say no more than "see tokenizer.json"; an ending of Fast is left out."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a folder's JSON files say; a missing one says nothing."""

    folder: Path
    tokenizer: Mapping[str, Any]
    generation: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def models(self) -> list[Mapping[str, Any]]:
        """config.json, and the part of it that describes a multimodal model's text."""
        text = self.config.get("text_config")
        return [self.config, text] if isinstance(text, dict) else [self.config]

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens by id; tokenizer_config.json names one more by its text."""
        eos = _ids(self.generation.get("eos_token_id"), self.folder / "generation_config.json")
        for model in self.models:
            eos |= _ids(model.get("eos_token_id"), self.folder / "config.json")
        return eos

    @property
    def vocab_size(self) -> int | None:
        """Rows of the model's embedding."""
        sizes = [model["vocab_size"] for model in self.models if isinstance(model.get("vocab_size"), int)]
        return sizes[0] if sizes else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names: bos_token, eos_token, and those that one model alone has."""
        extra = self.tokenizer.get("extra_special_tokens")
        said = {**self.tokenizer, **extra} if isinstance(extra, dict) else self.tokenizer
        found = {name: _text(token) for name, token in said.items() if name.endswith("_token")}
        return {name: token for name, token in found.items() if token is not None}


def read_files(folder: Path) -> TokenizerFiles:
    """Raises BadModel where the folder is missing or one of its files is no JSON object."""
    if not folder.is_dir():
        raise BadModel(f"{folder}: no such model folder")
    tokenizer = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in tokenizer:
        # An older form of the same; where both speak, it has the last word.
        tokenizer |= _read_object(folder / "special_tokens_map.json")
    return TokenizerFiles(
        folder,
        tokenizer,
        generation=_read_object(folder / "generation_config.json"),
        config=_read_object(folder / "config.json"),
    )


def read_vocabulary(files: TokenizerFiles) -> Vocabulary | None:
    """The vocabulary as tokenizer.json has it, with the tokens that tokenizer_config.json adds.

    None where that may not be what the model was trained with: no such file, code of the folder's own,
    or a class that writes the space before a text by rules of its own. Byte-level files leave nothing to
    such rules, whatever class they name.
    Lets through what the tokenizers library raises over a broken file.
    """
    path = files.folder / "tokenizer.json"
    if not path.exists() or "auto_map" in files.tokenizer:
        return None
    vocabulary = Vocabulary.from_file(str(path))
    named = str(files.tokenizer.get("tokenizer_class") or files.config.get("tokenizer_class"))
    if named.removesuffix("Fast") not in GENERIC and "ByteLevel" not in decoder_kinds(vocabulary):
        return None
    added = files.tokenizer.get("added_tokens_decoder") or {}
    vocabulary.add_tokens([AddedToken(**added[id]) for id in sorted(added, key=int)])
    extra = files.tokenizer.get("extra_special_tokens") or files.tokenizer.get("additional_special_tokens")
    listed = [_text(token) for token in extra] if isinstance(extra, list) else []
    special = dict.fromkeys([*files.special_tokens.values(), *(token for token in listed if token)])
    known = {token.content for token in vocabulary.get_added_tokens_decoder().values() if token.special}
    vocabulary.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special if token not in known]
    )
    return vocabulary


def find_template(found: object, folder: Path) -> str | None:
    """The one chat template among the places and forms in which models keep it.

    `found` is what tokenizer_config.json says; a file of its own goes before it. Raises BadModel where
    the template is no text.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    file = folder / "tokenizer_config.json"
    if found is None:
        file = folder / "chat_template.json"
        found = _read_object(file).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise BadModel(f"{file}: the chat template must be text, not {type(found).__name__}")
    return found


def decoder_kinds(vocabulary: Vocabulary) -> frozenset[str]:
    """The kinds of step in the decoder."""
    if vocabulary.decoder is None:
        return frozenset()
    state = json.loads(vocabulary.decoder.__getstate__())
    return frozenset(step["type"] for step in state.get("decoders", [state]))


def _text(token: object) -> str | None:
    """A special token is written as its text, or as an object with flags beside it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadModel(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path}: must be a JSON object")
    return value


def _ids(value: object, file: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise BadModel(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
    return frozenset(ids)
