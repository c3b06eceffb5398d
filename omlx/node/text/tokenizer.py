"""A model folder's tokenizer, and the only file that knows transformers."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer as Vocabulary

from omlx.errors import BadModel
from omlx.node.text.chat_template import ChatTemplate
from omlx.node.text.thinking import CLOSE_TAG, OPEN_TAG
from omlx.node.text.tokenizer_files import (
    TokenizerFiles,
    decoder_kinds,
    find_template,
    read_files,
    read_vocabulary,
)

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

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate | None,
        vocab_size: int | None,
        eos_ids: frozenset[int],
    ) -> None:
        """`vocab_size` None: as many as the vocabulary has."""
        # From here on nothing changes it any more.
        vocabulary.no_padding()
        vocabulary.no_truncation()
        self.vocabulary = vocabulary
        self.template = template
        self.vocab_size = vocab_size or vocabulary.get_vocab_size()
        self.eos_ids = eos_ids
        self.think_ids = self._pair(OPEN_TAG, CLOSE_TAG)
        added = vocabulary.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self.skipped = frozenset(self._special).difference(self.think_ids or ())
        kinds = decoder_kinds(vocabulary)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._spelled: dict[int, bytes] = {}
        self._anchor = self.encode("a", special=False)[-1]
        self.strips_space = self._strips_space()

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`; with `special` also those the tokenizer adds around it, such as BOS."""
        ids: list[int] = self.vocabulary.encode(text, add_special_tokens=special).ids
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
        return self.template is not None

    def render(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """See ChatTemplate.render; there must be a template."""
        assert self.template is not None
        return self.template.render(messages, kwargs)

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        text: str = self.vocabulary.decode(list(ids), skip_special_tokens=skip)
        return text

    def _spell(self, token: int) -> bytes:
        piece: str | None = self.vocabulary.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(piece)
        if token in self._special:
            return piece.encode()
        if self._byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._after_anchor([token]).encode()

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
        one, other = self.vocabulary.token_to_id(first), self.vocabulary.token_to_id(second)
        return None if one is None or other is None else (one, other)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, with its chat template and its end tokens.

    Reads local files only and runs none of the folder's code. Raises BadModel with the file's name.
    """
    files = read_files(folder)
    with _Translated(folder / "tokenizer.json"):
        vocabulary, names = read_vocabulary(files), files.special_tokens
        if vocabulary is None:
            vocabulary, names = _converted(files)
        source = find_template(files.tokenizer.get("chat_template"), folder)
        template = None if source is None else ChatTemplate(source, names)
        eos = vocabulary.token_to_id(names["eos_token"]) if "eos_token" in names else None
        ends = files.eos_ids if eos is None else files.eos_ids | {eos}
        return Tokenizer(vocabulary, template, files.vocab_size, ends)


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


def _converted(files: TokenizerFiles) -> tuple[Vocabulary, dict[str, str]]:
    """The vocabulary and the special tokens' names as transformers makes them of other forms."""
    # A second of imports and 50 MB, so only for folders that need it.
    # Its advice about PyTorch and model classes is for who runs models with it; we say ourselves what a
    # folder lacks. It sets its own level while it is imported, so the notice there needs a filter.
    logging.getLogger("transformers").addFilter(_is_an_error)
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    hf: Any = AutoTokenizer.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
    if not hf.is_fast:
        raise BadModel(f"{files.folder}: its tokenizer has no fast form; add a tokenizer.json")
    return hf.backend_tokenizer, dict(hf.special_tokens_map)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


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
