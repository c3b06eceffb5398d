"""A block's name: a BLAKE3 chained over its tokens, all blocks before it, and what keys and values depend on.

Equal names mean equal keys and values, on any machine and after any restart; so a name needs no address.
"""

import json
import struct
from collections.abc import Iterable, Mapping

from blake3 import blake3

from omlx.ids import BlockId

ID_BYTES = 16
TOKEN_BYTES = 4
ROOT_CONTEXT = "oMLX 2026 root of a chain of cache blocks"
"""Sets roots apart: no block's parent and tokens can be made to hash to one."""


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as uint32, little endian. Raises struct.error for an id below 0 or above 2**32 - 1."""
    ids = tuple(tokens)
    return struct.pack(f"<{len(ids)}I", *ids)


def root_of(identity: Mapping[str, str]) -> BlockId:
    """The parent of a sequence's first block. The order of `identity` is of no account."""
    # JSON quotes both sides, so no key can pass for the end of another one's value.
    written = json.dumps(dict(identity), sort_keys=True).encode("ascii")
    return BlockId(blake3(written, derive_key_context=ROOT_CONTEXT).digest(ID_BYTES))


def name(parent: BlockId, tokens: bytes, content: bytes = b"") -> BlockId:
    """The id of the block of packed `tokens` behind `parent`.

    content: a digest of all media at or before the block; placeholders are the same tokens in every picture.
    """
    # The length comes first, or the end of the content could pass for tokens.
    head = parent + len(content).to_bytes(4, "little") + content
    return BlockId(blake3(head + tokens).digest(ID_BYTES))


def chain(root: BlockId, tokens: bytes, block_tokens: int) -> list[BlockId]:
    """The ids of all full blocks of packed `tokens`, in order; what is left over at the end has none."""
    size = block_tokens * TOKEN_BYTES
    ids: list[BlockId] = []
    parent = root
    for end in range(size, len(tokens) + 1, size):
        parent = name(parent, tokens[end - size : end])
        ids.append(parent)
    return ids
