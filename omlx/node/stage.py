"""One stage of the pipeline: it obeys step plans in order. Source -> layers -> sink.

The first embeds tokens, the last draws the next ones and hands them to the first; first, middle, last and
only stage are this one class. It knows no sockets and no head.

One forward is kept in the air: its successor's graph is built while the device computes it, wherever the
successor's input is there already. Before the stage waits for anybody, it finishes what is in the air.

Alone, the next forward is even launched, or the device would idle. MLX's CPU holds whoever launches up until
most of it is computed: there a second thread ends the forward in front meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from omlx.errors import OutOfStep, StepFailed
from omlx.ids import BlockId, Epoch
from omlx.node.ahead import Ahead
from omlx.node.blocks import Blocks
from omlx.node.links import Link
from omlx.node.mixing import Mixed, make_mixable
from omlx.node.rows import Block, Rows
from omlx.node.sampling import Draw, Sampler
from omlx.node.slab import Slab
from omlx.node.slicing import Cut
from omlx.node.step import Sampled, Slice, StepPlan
from omlx.node.wire import PlanTimes, Tag

IN_THE_AIR = 1
"""Forwards that stay unfinished while the next plan is waited for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A plan that this stage has carried out."""

    plan: StepPlan
    sampled: tuple[Sampled, ...]
    """What it drew, on the last stage."""
    times: PlanTimes


@dataclass(slots=True)
class Underway:
    """A plan that is being carried out. Times are on time.monotonic."""

    plan: StepPlan
    forwards: int
    """That are not finished."""
    taken: float
    began: float = 0.0
    launched: float = 0.0
    busy_s: float = 0.0
    sampled: list[Sampled] = field(default_factory=list)
    unbuilt: int = 0
    """Forwards that are not built."""
    beside: list[mx.array] = field(default_factory=list)
    """What is laid back and kept, computed with the first forward."""
    kept: list[tuple[BlockId, Slab]] = field(default_factory=list)
    """What goes into the store then."""


@dataclass(slots=True)
class Launched:
    """A forward, perhaps still being computed."""

    plan: Underway
    tag: Tag
    slices: tuple[Slice, ...]
    began: float
    """When its input was there."""
    arrays: list[Any] = field(default_factory=list)
    """What it computes, in any nesting; forgotten as soon as it is launched. Whoever holds a cache's array
    then makes the next forward copy all of it instead of writing into it."""
    signs: list[mx.array] = field(default_factory=list)
    """By these it is seen that all of that is done. No cache is among them: the next forward writes into its
    arrays as soon as it is built, and to wait for one would compute that forward."""
    gives: mx.array | None = None
    """What goes to the neighbour behind."""
    draw: Draw | None = None
    ended: Future[None] | None = None
    """Where a second thread ends it."""


@dataclass(slots=True)
class Stage:
    """Owned by one compute thread, the one that loaded the weights: MLX streams belong to threads."""

    cut: Cut
    tell: Callable[[Finished], None]
    """Called for every plan, in order, as soon as it is carried out; perhaps by the second thread, and never
    by both at once."""
    blocks: Blocks = field(init=False)
    """Between its caches and what is kept of them."""
    mixed: Mixed | None = field(init=False)
    """Computes all slices of a plan in one forward; None where the family cannot."""
    epoch: Epoch | None = None
    """None between epochs."""
    source: Link | None = None
    sink: Link | None = None
    next_plan: int = 0
    rows: Rows = field(init=False)
    sampler: Sampler = field(default_factory=Sampler)
    ahead: Ahead = field(default_factory=Ahead)
    launches_ahead: bool = field(init=False)
    """Whether a forward is launched before the one in front of it has ended. A GPU would idle else. A
    neighbour would wait for the time of the launch; a CPU launches ahead of what the second thread ends."""
    _second: ThreadPoolExecutor | None = None
    """One thread, where a CPU is the whole pipeline. It launches nothing, and no later forward reads the
    arrays that it waits for: MLX does not guard an array's state."""
    _spoilt: bool = False
    """A launch raised: what is in the air may be the cause, and nobody may be told what it drew."""
    _air: deque[Launched] = field(default_factory=deque)
    _idle_since: float = 0.0

    def __post_init__(self) -> None:
        self.mixed = make_mixable(self.cut)
        on_gpu = mx.default_device() == mx.gpu
        self.launches_ahead = self.alone and on_gpu
        if self.alone and not on_gpu:
            self._second = ThreadPoolExecutor(1, "end-forwards")
        self.rows = Rows(self.cut)
        self.blocks = Blocks(self.rows)

    @property
    def alone(self) -> bool:
        """Whether it is the whole pipeline."""
        return self.cut.first and self.cut.last

    def begin(self, epoch: Epoch, source: Link | None, sink: Link | None) -> None:
        """A new epoch: no sequences, weights kept. Raises OutOfStep where the ends do not fit the span."""
        if (source is None) != self.alone or (sink is None) != self.alone:
            raise OutOfStep(f"layers {self.cut.start} to {self.cut.end} with the wrong neighbours")
        self.close()
        self.epoch, self.source, self.sink, self.next_plan = epoch, source, sink, 0

    def close(self) -> None:
        """Drop every sequence and hang up on the neighbours."""
        for launched in self._air:
            if launched.ended is not None:
                launched.ended.exception()  # waits; what went wrong is no matter any more
        self._air.clear()
        self._spoilt = False
        self.blocks.clear()
        self.rows.clear()
        self.sampler.clear()
        self.ahead.clear()
        mx.clear_cache()
        for link in (self.source, self.sink):
            if link is not None:
                link.close()
        self.source = self.sink = self.epoch = None

    def step(self, plan: StepPlan) -> None:
        """Carry out one plan. Its last forward may still be in the air afterwards.

        Raises StageLost (LinkLost, TooLate, OutOfStep, StepFailed): the epoch is over, this stage may
        begin another.
        """
        if (plan.epoch, plan.id) != (self.epoch, self.next_plan):
            raise OutOfStep(f"plan {plan.id} of epoch {plan.epoch}, {self.next_plan} of {self.epoch} was due")
        self.next_plan += 1
        taken = time.monotonic()
        if self.cut.first and self.source is not None:
            self.ahead.clear_away(plan.committed, self._take)
        kept = self.blocks.keep(plan.keeps)
        for seq in plan.drops:
            self.blocks.drop(seq)
            self.ahead.drop(seq)
            if self.cut.last:
                self.sampler.drop(seq)
        self.rows.drop(plan.drops)
        for admit in plan.admits:
            self.rows.admit(admit.seq)
            if self.cut.last:
                self.sampler.admit(admit)
        beside = [array for _, slab in kept for array in slab.arrays()]
        beside += self.blocks.lay(plan.restores)
        self.blocks.begin(piece.seq for piece in plan.slices)
        with _blaming(plan.slices):
            blocks = self.rows.blocks(plan.slices)
        forwards = [blocks] if self.mixed is not None or not blocks else [[block] for block in blocks]
        underway = Underway(plan, len(forwards), taken, unbuilt=len(forwards), beside=beside, kept=kept)
        for part, together in enumerate(forwards):
            self._launch(underway, Tag(plan.epoch, plan.id, part), together)
        self.blocks.evict(plan.evicts)

    def settle(self) -> None:
        """Finish what is in the air. Raises as `step` does."""
        self._finish(down_to=0)

    # ---------------------------------------------------------------- building a forward

    def _launch(self, plan: Underway, tag: Tag, blocks: list[Block]) -> None:
        """Build one forward and start it. Neighbours agree on `tag`, so nothing else needs saying."""
        slices = tuple(piece for block in blocks for piece in block.slices)
        with _blaming(slices):
            x = self._input(tag, blocks) if blocks else None
            launched = Launched(plan, tag, slices, began=time.monotonic())
            if x is not None:
                self._build(launched, x, blocks)
            launched.arrays += plan.beside
            plan.beside = []
            plan.unbuilt -= 1
            if not plan.unbuilt:
                launched.arrays += self.blocks.set_aside(plan.plan.cuts)
        if not (self.launches_ahead or (self._air and self._air[-1].ended is not None)):
            self._finish(down_to=0)
        self._start(launched)
        plan.began = plan.began or launched.began
        plan.launched = time.monotonic()
        self._air.append(launched)
        self._finish(down_to=IN_THE_AIR)
        if self._second is not None and launched.signs and not plan.kept:
            launched.ended = self._second.submit(self._end, launched)

    def _start(self, launched: Launched) -> None:
        """MLX's CPU may raise here what a forward in front ran into."""
        in_front = tuple(piece for other in self._air for piece in other.slices)
        try:
            with _blaming(launched.slices + in_front):
                mx.async_eval(launched.arrays, launched.signs)
                launched.arrays.clear()
        except StepFailed:
            self._spoilt = True
            raise

    def _build(self, launched: Launched, x: mx.array, blocks: list[Block]) -> None:
        out = self._forward(x, blocks)
        if not self.cut.last:
            launched.gives = out
            launched.signs.append(out)
            return
        # The head is lazy: a chunk of a prompt costs this stage its layers alone. Elsewhere the
        # caches are computed on the way to `out`, and naming each of them costs milliseconds.
        for block in blocks:
            if not block.slices[0].sample:
                states = [cache.state for cache in block.caches]
                launched.arrays += states
                leaves: Any = tree_flatten(states)
                launched.signs += [leaf[..., :1] + 0 for _, leaf in leaves if isinstance(leaf, mx.array)][-1:]
        if drawn := tuple(piece for piece in launched.slices if piece.sample):
            self._draw(launched, out, drawn)

    def _input(self, tag: Tag, blocks: list[Block]) -> mx.array:
        """On the first stage token ids, behind it the hidden state: [B, L] of the only block, or [1, T] of
        all of them one after the other."""
        if not self.cut.first:
            return self._take(tag)
        parts = [self.ahead.tokens(block.slices, self._take) for block in blocks]
        if self.source is not None:
            drawn = tuple(piece.seq for block in blocks for piece in block.slices if piece.sample)
            if drawn:
                self.ahead.expect(tag, drawn)
        return (
            parts[0] if len(parts) == 1 else mx.concatenate([part.reshape(1, -1) for part in parts], axis=1)
        )

    def _forward(self, x: mx.array, blocks: Sequence[Block]) -> mx.array:
        """The hidden state; on the last stage logits [drawn rows, vocabulary]."""
        if self.mixed is None:
            (block,) = blocks
            out = self.cut(x, block.caches)
            return out[:, -1] if self.cut.last else out
        wanted: list[int] = []
        positions = 0
        for block in blocks:
            if block.slices[0].sample:
                wanted += range(positions + block.length - 1, positions + block.positions, block.length)
            positions += block.positions
        out = self.mixed(x, blocks, wanted or None)
        return out[0] if self.cut.last else out

    def _draw(self, launched: Launched, logits: mx.array, drawn: tuple[Slice, ...]) -> None:
        launched.draw = draw = self.sampler.draw(logits, drawn)
        if self.alone:
            self.ahead.note(tuple(piece.seq for piece in drawn), draw.tokens)
            launched.draw = draw = replace(draw, tokens=draw.tokens + 0)  # whoever reads it has its own
        else:
            launched.gives = draw.tokens[:, None, None].astype(mx.int32)
            launched.signs.append(launched.gives)
        launched.signs += draw.arrays

    def _take(self, tag: Tag) -> mx.array:
        """From the source. What is in the air is finished first: whom it waits for may wait for that."""
        assert self.source is not None
        if not self.source.ready():
            self.settle()
        return self.source.take(tag)

    # ---------------------------------------------------------------- finishing it

    def _finish(self, down_to: int) -> None:
        while len(self._air) > down_to:
            launched = self._air.popleft()
            if launched.ended is not None:
                launched.ended.result()
            else:
                self._end(launched)

    def _end(self, launched: Launched) -> None:
        """Wait for it, and hand on what came of it."""
        with _blaming(launched.slices):
            self.wait(launched)
        if self._spoilt:
            return
        now, plan = time.monotonic(), launched.plan
        plan.busy_s += now - max(launched.began, self._idle_since)
        self._idle_since = now
        if launched.gives is not None:
            assert self.sink is not None
            self.sink.give(launched.tag, launched.gives)
        if launched.draw is not None:
            plan.sampled += launched.draw.read()
        plan.forwards -= 1
        if not plan.forwards:
            self.blocks.store_kept(plan.kept)
            times = PlanTimes(
                plan.plan.id, plan.busy_s, plan.taken, plan.began, plan.launched, now, time.monotonic()
            )
            self.tell(Finished(plan.plan, tuple(plan.sampled), times))

    def wait(self, launched: Launched) -> None:
        """Until the device has computed it."""
        mx.eval(launched.signs)


@contextmanager
def _blaming(slices: tuple[Slice, ...]) -> Iterator[None]:
    """What MLX and the models raise is about these sequences: neither the plan nor the process is to
    blame, and the other sequences must not pay for it more than once."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        seqs = tuple(dict.fromkeys(piece.seq for piece in slices))
        raise StepFailed(f"{type(error).__name__}: {error}", seqs) from error
