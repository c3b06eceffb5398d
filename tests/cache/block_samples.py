"""Blocks of random bytes for the tests of files, shelves and folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from omlx.cache.block_file import Label, Tensor
from omlx.cache.shelf import Shelf
from omlx.ids import BlockId


def new_id() -> BlockId:
    return BlockId(os.urandom(16))


def new_label(restorable: bool = True, start: int = 256, parent: BlockId | None = None) -> Label:
    return Label(
        id=new_id(), parent=parent or new_id(), tokens=os.urandom(64), start=start, restorable=restorable
    )


def new_chain(length: int, restorable: bool = True) -> list[Label]:
    """Each the parent of the next."""
    labels = [new_label(restorable, 0)]
    for number in range(1, length):
        labels.append(new_label(restorable, 256 * number, labels[-1].id))
    return labels


def layers(first: int, last: int, size: int = 100) -> list[Tensor]:
    return [
        Tensor(f"{layer}.{part}", "F16", (2, size // 2), os.urandom(2 * size))
        for layer in range(first, last)
        for part in "kv"
    ]


def content(tensors: list[Tensor]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """What can be compared."""
    return [(tensor.name, tensor.dtype, tensor.shape, bytes(tensor.data)) for tensor in tensors]


@contextmanager
def any_user(folder: Path) -> Iterator[None]:
    """Root may read everything: here it is nobody, to whom `folder` then belongs."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    opened = [parent for parent in folder.parents if not parent.stat().st_mode & 0o001]
    modes = [parent.stat().st_mode for parent in opened]
    for parent, mode in zip(opened, modes, strict=True):
        parent.chmod(mode | 0o011)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in zip(opened, modes, strict=True):
            parent.chmod(mode)


def made_of(id: BlockId) -> list[Tensor]:
    """Tensors that tell whose they are."""
    return [
        Tensor(f"{layer}.k", "U8", (100_000,), blake3(id + bytes([layer])).digest(100_000))
        for layer in range(2)
    ]


def store_for_ever(dir: Path, root: BlockId) -> None:
    """For a child process that is killed: prints the id of each block that is stored."""
    shelf = Shelf.open(dir, root, 0, 4)
    while True:
        label = new_label()
        shelf.store(label, made_of(label.id))
        print(label.id.hex(), flush=True)
