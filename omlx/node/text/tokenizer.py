"""A model folder's tokenizer, and the only file that knows transformers."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from omlx.errors import BadModel
from omlx.node.text.thinking import CLOSE_TAG, OPEN_TAG

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that steer the rendering itself: a client may not set them through its template's arguments."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads at once.

    `vocab_size` counts the rows of the model's embedding: a token id is below it.
    `eos_ids` end an answer. `skipped` never show in text: the special tokens without the thinking tags.
    `think_ids` are the ids of <think> and </think> where the vocabulary has both.
    `strips_space`: decoding drops one leading space of the whole text.
    """

    def __init__(self, hf: Any, template: str | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._hf = hf
        self._template = template
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.think_ids = self._pair(OPEN_TAG, CLOSE_TAG)
        added = hf.added_tokens_decoder
        self._special = {id for id, token in added.items() if token.special} | set(hf.all_special_ids)
        self.skipped = frozenset(self._special).difference(self.think_ids or ())
        kinds = _decoder_kinds(hf)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds or not kinds
        self._spelled: dict[int, bytes] = {}
        # The first call settles padding and truncation for good; after it, encoding changes nothing.
        self._anchor = self.encode("a", special=False)[-1]
        self.strips_space = self._strips_space()

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`; with `special` also those the tokenizer adds around it, such as BOS."""
        ids: list[int] = self._hf.encode(text, add_special_tokens=special, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all `ids` at once, special tokens left out."""
        return self._decode(ids, skip=True)

    def token_bytes(self, token: int) -> bytes:
        """What `token` stands for within a text, in UTF-8 that may be part of a character.

        Special tokens give their name; an id that no token has gives nothing.
        """
        spelled = self._spelled.get(token)
        if spelled is None:
            spelled = self._spelled[token] = self._spell(token)
        return spelled

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """The prompt as text, open for the assistant's answer.

        Lets through whatever the template raises: jinja2.TemplateError, or what its expressions lead to.
        """
        text: str = self._hf.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
            **kwargs,
        )
        return text

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        text: str = self._hf.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    def _spell(self, token: int) -> bytes:
        piece = self._piece(token)
        if piece is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(piece)
        if token in self._special:
            return piece.encode()
        if self._byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._after_anchor([token]).encode()

    def _piece(self, token: int) -> str | None:
        try:
            piece: str | None = self._hf.convert_ids_to_tokens(token)
        except IndexError:
            return None
        return piece

    def _after_anchor(self, ids: list[int]) -> str:
        """The text of `ids` in the middle of a text, where no leading space is dropped."""
        before = self._decode([self._anchor], skip=False)
        return self._decode([self._anchor, *ids], skip=False)[len(before) :]

    def _strips_space(self) -> bool:
        if self._byte_level:
            return False
        ids = self.encode(" a", special=False)
        return self._after_anchor(ids) == " " + self._decode(ids, skip=False)

    def _pair(self, first: str, second: str) -> tuple[int, int] | None:
        ids = [self._hf.convert_tokens_to_ids(piece) for piece in (first, second)]
        if None in ids or [self._piece(id) for id in ids] != [first, second]:
            return None
        return ids[0], ids[1]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, with its chat template and its end tokens.

    Reads local files only and runs none of the folder's code. Raises BadModel with the file's name.
    """
    if not folder.is_dir():
        raise BadModel(f"{folder}: no such model folder")
    settings, generation, config = (
        _read_object(folder / name)
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    text_config = config.get("text_config")
    layers = [config, text_config] if isinstance(text_config, dict) else [config]
    loader = _auto_tokenizer()
    with _Translated(folder / "tokenizer.json"):
        hf = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        eos = _ids(hf.eos_token_id, folder / "tokenizer_config.json")
        eos |= _ids(generation.get("eos_token_id"), folder / "generation_config.json")
        for layer in layers:
            eos |= _ids(layer.get("eos_token_id"), folder / "config.json")
        sizes = [layer["vocab_size"] for layer in layers if isinstance(layer.get("vocab_size"), int)]
        template = _template(hf.chat_template or settings.get("chat_template"), folder)
        return Tokenizer(hf, template, sizes[0] if sizes else len(hf), eos)


class _Translated:
    """What the libraries raise over a broken folder becomes a BadModel with the file's name.

    The tokenizers library raises a bare Exception for a file that it cannot read: that very class, none of
    its subclasses, is meant by `Exception` below.
    """

    known = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (kind is Exception or issubclass(kind, self.known)):
            reason = " ".join(str(error).split())
            raise BadModel(f"{self.file}: no tokenizer can be made of this folder: {reason[:300]}") from error


def _auto_tokenizer() -> Any:
    # Two seconds, so only where a model is served.
    # Its advice about PyTorch and model classes is for who runs models with it; we say ourselves what a
    # folder lacks. It sets its own level while it is imported, so the notice there needs a filter.
    logging.getLogger("transformers").addFilter(_is_an_error)
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    return AutoTokenizer


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


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


def _template(found: object, folder: Path) -> str | None:
    """The one chat template among the places and forms in which models keep it.

    transformers has read chat_template.jinja and tokenizer_config.json; chat_template.json is left to us.
    """
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


def _decoder_kinds(hf: Any) -> frozenset[str]:
    """The kinds of step in a fast tokenizer's decoder; none for a slow one."""
    decoder = getattr(getattr(hf, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(step["type"] for step in state.get("decoders", [state]))


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: printable Latin-1 as itself, the other
    68 bytes, in order, as the characters from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """A piece with a character outside the alphabet was added as plain text, and stands for itself."""
    try:
        return bytes(_ALPHABET[char] for char in piece)
    except KeyError:
        return piece.encode()
