"""What a model's keys and values depend on: the contents of its files, the KV format, the code's versions.

A name or a folder says nothing: weights are overwritten in place, and one model lies in two folders. Nor are
the chat template and the tokenizer part of it: they decide which tokens a prompt has, and every block's name
covers its tokens. Other tokens are another block, the same tokens have the same keys and values.
"""

import json
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import structlog
from blake3 import blake3

from omlx.cache.block import root_of
from omlx.errors import BadModel
from omlx.ids import BlockId

CACHE_VERSION = "1"
"""Grows with every change of how blocks are named, cut or written that makes older ones wrong."""
READ_BYTES = 8 << 20
"""Enough for every core to hash a part of it."""

log = structlog.get_logger()
Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, mtime_ns, ctime_ns: while they stay, nobody wrote to the file. ctime is in it because
tools that copy or restore a file set its mtime back."""


def identity_of(folder: Path, memo: Path | None, kv_format: str, block_tokens: int) -> dict[str, str]:
    """All that changes keys and values, beside tokens and media, and how they are cut. Raises BadModel like
    `weights_digest`.

    kv_format: type and quantization of what is kept ("bfloat16", "int4/64").
    """
    return {
        "weights": weights_digest(folder, memo),
        "kv_format": kv_format,
        "block_tokens": str(block_tokens),
        "cache_version": CACHE_VERSION,
        "mlx_lm": version("mlx-lm"),
    }


def model_root(folder: Path, memo: Path | None, kv_format: str, block_tokens: int) -> BlockId:
    """The parent of every first block of this model. Raises BadModel like `weights_digest`."""
    return root_of(identity_of(folder, memo, kv_format, block_tokens))


def weights_digest(folder: Path, memo: Path | None) -> str:
    """BLAKE3, in hex, over the names and contents of all *.safetensors of `folder` and what config.json says.

    Not over the layout of config.json, the folder's path, the chat template or the tokenizer (the module's
    first lines say why). Links are followed, as in the cache of Hugging Face.
    memo: a JSON file of digests by path and stamp, which spares reading files that have not changed. It may
    be missing, damaged, or written by others meanwhile: files are read again then, nothing else.
    Raises BadModel, which names the file: missing, unreadable, not JSON, or written to while it was read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModel(f"{folder}: there is no *.safetensors file; download the model again")
    known = _read_memo(memo) if memo else {}
    digests: dict[str, str] = {}
    fresh: dict[str, tuple[Stamp, str]] = {}
    for file in files:
        path, stamp = _stamp(file)
        if path not in known or known[path][0] != stamp:
            known[path] = fresh[path] = stamp, _file_digest(file)
            if _stamp(file) != (path, stamp):
                raise BadModel(f"{file} was written to while it was read; try again when that is over")
        digests[file.name] = known[path][1]
    if memo and fresh:
        # Read again: another process may have added its own meanwhile.
        _write_memo(memo, _read_memo(memo) | fresh)
    whole = {"files": digests, "config": _config(folder / "config.json")}
    return blake3(json.dumps(whole, sort_keys=True).encode("ascii")).hexdigest()


def _stamp(file: Path) -> tuple[str, Stamp]:
    """The path behind all links, and the stamp of what lies there."""
    try:
        path = file.resolve(strict=True)
        found = path.stat()
    # resolve: a link that leads to itself.
    except (OSError, RuntimeError) as error:
        raise BadModel(f"{file}: cannot be read ({error}); download the model again") from error
    return str(path), (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _file_digest(file: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    # Not mapped: a map of a file that shrinks, or of a disk that fails, ends the process instead of raising.
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        with file.open("rb", buffering=0) as opened:
            while size := opened.readinto(buffer):
                hasher.update(buffer[:size])
    except OSError as error:
        raise BadModel(f"{file}: cannot be read ({error.strerror})") from error
    return hasher.hexdigest()


def _config(path: Path) -> object:
    """What is in it, whatever the spaces and the order of keys."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BadModel(f"{path}: cannot be read ({error.strerror}); download the model again") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path}: not usable JSON ({error}); download it again") from error


def _read_memo(memo: Path) -> dict[str, tuple[Stamp, str]]:
    """Empty where it is missing or damaged; lines of another shape are left out."""
    try:
        lines = json.loads(memo.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(lines, dict):
        return {}
    found = {path: _line(line) for path, line in lines.items()}
    return {path: line for path, line in found.items() if line is not None}


def _line(line: object) -> tuple[Stamp, str] | None:
    match line:
        case {"stamp": [int(a), int(b), int(c), int(d), int(e)], "blake3": str(digest)}:
            return (a, b, c, d, e), digest
    return None


def _write_memo(memo: Path, known: dict[str, tuple[Stamp, str]]) -> None:
    """Under a temporary name first, so nobody ever reads half of it. Of two writers at once the later wins,
    and the other one's files are read once more some day."""
    lines = {path: {"stamp": stamp, "blake3": digest} for path, (stamp, digest) in known.items()}
    beside = None
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=memo.parent, prefix=memo.name, suffix=".tmp", delete=False
        ) as beside:
            json.dump(lines, beside)
        Path(beside.name).replace(memo)
    except OSError as error:
        # It only saves time. A folder that cannot be written to is told by whoever needs it to be.
        log.warning("digests not kept", path=str(memo), reason=error.strerror)
        if beside:
            with suppress(OSError):
                Path(beside.name).unlink()
