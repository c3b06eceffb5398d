"""Between a stage's running caches and its store: blocks are cut out, set aside, and laid back as plans say.

Everything here is lazy: arrays are computed with the forward of the plan that asked for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from omlx.errors import OutOfStep
from omlx.ids import BlockId, SeqId
from omlx.node.rows import Rows
from omlx.node.slab import Laying, Run, Slab, cut_out, places_of
from omlx.node.step import Cut, Keep, Restore
from omlx.node.store import Store


@dataclass(slots=True)
class Blocks:
    """Owned by the compute thread."""

    rows: Rows
    store: Store | None = None
    """Without one, plans ask for nothing here."""
    _places: list[int] = field(init=False)
    _aside: dict[tuple[SeqId, int, int], Slab] = field(default_factory=dict)
    """Cut, and not named yet."""
    _laying: dict[SeqId, Laying] = field(default_factory=dict)
    """Rows that more blocks may come for."""

    def __post_init__(self) -> None:
        self._places = places_of(self.rows.cut)

    def clear(self) -> None:
        self._aside.clear()
        self._laying.clear()

    def drop(self, seq: SeqId) -> None:
        self._laying.pop(seq, None)
        for key in [key for key in self._aside if key[0] == seq]:
            del self._aside[key]

    def keep(self, keeps: Iterable[Keep]) -> list[tuple[BlockId, Slab]]:
        """What to put into the store once it is computed. Raises OutOfStep for an unknown sequence."""
        kept = []
        for keep in keeps:
            slab = self._aside.pop((keep.seq, keep.start, keep.end), None)
            kept.append((keep.block, slab or self._cut(keep.seq, keep.start, keep.end)))
        return kept

    def set_aside(self, cuts: Iterable[Cut]) -> list[mx.array]:
        """To be called when the forward that reaches the cuts' ends is built; returns what to compute."""
        arrays = []
        for cut in cuts:
            slab = self._cut(cut.seq, cut.start, cut.end, cut.snapshot)
            self._aside[cut.seq, cut.start, cut.end] = slab
            arrays += slab.arrays()
        return arrays

    def lay(self, restores: Iterable[Restore]) -> list[mx.array]:
        """Blocks behind what rows have; returns what to compute. Raises OutOfStep for a missing block."""
        arrays: list[mx.array] = []
        for restore in restores:
            ends = False
            assert self.store is not None
            laying = self._laying.get(restore.seq)
            if laying is None:
                laying = Laying(self.rows.cut.make_caches(), self._places, restore.room)
                self._laying[restore.seq] = laying
            if laying.tokens != restore.start:
                raise OutOfStep(f"blocks for {restore.start} tokens on, where there are {laying.tokens}")
            for id in restore.blocks:
                slab = self.store.take(id)
                if slab is None:
                    raise OutOfStep(f"block {id.hex()} is not here")
                laying.add(slab.pieces, min(self.store.block_tokens, restore.end - laying.tokens))
                ends = slab.restorable
            if ends:  # else more blocks come, and the last of them has what a recurrent layer needs
                self.rows.put(restore.seq, laying.finish(), restore.end)
            arrays += laying.arrays()
        return arrays

    def begin(self, seqs: Iterable[SeqId]) -> None:
        """These are computed now: no more blocks come for them, and their caches are their own.

        Raises OutOfStep where a row cannot go on from the last block that was laid for it.
        """
        for seq in seqs:
            laying = self._laying.pop(seq, None)
            if laying is not None and laying.tokens != self.rows.where(seq)[2]:
                self.rows.put(seq, laying.finish(), laying.tokens)

    def store_kept(self, kept: list[tuple[BlockId, Slab]]) -> None:
        """What `keep` gave, once it is computed."""
        if kept:
            assert self.store is not None
            mx.eval([slab.arrays() for _, slab in kept])
            self.store.keep(kept)

    def evict(self, ids: tuple[BlockId, ...]) -> None:
        """Out of the store's RAM; what was laid back stays."""
        if ids:
            assert self.store is not None
            self.store.evict(ids)

    def _cut(self, seq: SeqId, start: int, end: int, states: bool = True) -> Slab:
        caches, row, tokens = self.rows.where(seq)
        return cut_out(caches, self._places, Run(row, tokens, start, end, states))
