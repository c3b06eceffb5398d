"""One stage of the pipeline: it obeys step plans in order. Source -> layers -> sink.

The first embeds tokens, the last draws the next ones and hands them to the first; first, middle, last and
only stage are this one class. It knows no sockets and no head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from omlx.errors import OutOfStep, StepFailed
from omlx.ids import Epoch
from omlx.node.ahead import Ahead
from omlx.node.links import Link
from omlx.node.rows import Rows
from omlx.node.sampling import Draw, Sampler
from omlx.node.slicing import Cut
from omlx.node.step import Sampled, Slice, StepPlan, StepResult
from omlx.node.wire import Tag


@dataclass(slots=True)
class Launched:
    """A plan's draws on the last stage, perhaps still being computed."""

    plan: StepPlan
    draws: list[Draw] = field(default_factory=list)

    def read(self) -> StepResult:
        """Wait for them. Raises StepFailed."""
        drawn: list[Sampled] = []
        for draw in self.draws:
            with _blaming(draw.slices):
                drawn += draw.read()
        return StepResult(self.plan.id, self.plan.epoch, tuple(drawn))


@dataclass(slots=True)
class Stage:
    """Owned by one compute thread, the one that loaded the weights: MLX streams belong to threads."""

    cut: Cut
    epoch: Epoch | None = None
    """None between epochs."""
    source: Link | None = None
    sink: Link | None = None
    next_plan: int = 0
    rows: Rows = field(init=False)
    sampler: Sampler = field(default_factory=Sampler)
    ahead: Ahead = field(default_factory=Ahead)

    def __post_init__(self) -> None:
        self.rows = Rows(self.cut)

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
        self.rows.clear()
        self.sampler.clear()
        self.ahead.clear()
        mx.clear_cache()
        for link in (self.source, self.sink):
            if link is not None:
                link.close()
        self.source = self.sink = self.epoch = None

    def step(self, plan: StepPlan) -> Launched | None:
        """Carry out one plan: drop, admit, compute. The last stage returns what it draws, perhaps while
        it is still being computed.

        Raises StageLost (LinkLost, TooLate, OutOfStep, StepFailed): the epoch is over, this stage may
        begin another.
        """
        if (plan.epoch, plan.id) != (self.epoch, self.next_plan):
            raise OutOfStep(f"plan {plan.id} of epoch {plan.epoch}, {self.next_plan} of {self.epoch} was due")
        self.next_plan += 1
        if self.cut.first and self.source is not None:
            self.ahead.clear_away(plan.committed, self.source)
        for seq in plan.drops:
            self.rows.drop(seq)
            self.ahead.drop(seq)
            if self.cut.last:
                self.sampler.drop(seq)
        for admit in plan.admits:
            self.rows.admit(admit.seq)
            if self.cut.last:
                self.sampler.admit(admit)
        launched = Launched(plan)
        for part, slices in enumerate(plan.batches()):
            with _blaming(slices):
                self._forward(Tag(plan.epoch, plan.id, part), slices, launched)
        return launched if self.cut.last else None

    def _forward(self, tag: Tag, slices: tuple[Slice, ...], launched: Launched) -> None:
        """One model call. Neighbouring stages agree on `tag`, so nothing else needs saying."""
        caches = self.rows.together([piece.seq for piece in slices])
        out = self.cut(self._input(tag, slices), caches)
        if not self.cut.last:
            mx.eval(out)
            self._give(tag, out)
        elif slices[0].sample:
            self._draw(tag, slices, out[:, -1, :], launched)
        else:
            # The head is lazy: a chunk of a prompt costs this stage its layers alone. Elsewhere the
            # caches are computed on the way to `out`, and naming each of them costs a millisecond or two.
            mx.async_eval([cache.state for cache in caches])

    def _input(self, tag: Tag, slices: tuple[Slice, ...]) -> mx.array:
        """Token ids [B, L] on the first stage, the hidden state [B, L, hidden] behind it."""
        if not self.cut.first:
            assert self.source is not None
            return self.source.take(tag)
        tokens = self.ahead.tokens(slices, self.source)
        if self.source is not None and slices[0].sample:
            self.ahead.expect(tag, tuple(piece.seq for piece in slices))
        return tokens

    def _draw(self, tag: Tag, slices: tuple[Slice, ...], logits: mx.array, launched: Launched) -> None:
        draw = self.sampler.draw(logits, slices)
        launched.draws.append(draw)
        mx.async_eval(draw.arrays)
        if self.alone:
            self.ahead.note(tuple(piece.seq for piece in slices), draw.tokens)
        else:
            self._give(tag, draw.tokens[:, None, None].astype(mx.int32))

    def _give(self, tag: Tag, array: mx.array) -> None:
        assert self.sink is not None
        self.sink.give(tag, array)


@contextmanager
def _blaming(slices: tuple[Slice, ...]) -> Iterator[None]:
    """What MLX and the models raise is about these sequences: neither the plan nor the process is to
    blame, and the other sequences must not pay for it more than once."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        seqs = tuple(piece.seq for piece in slices)
        raise StepFailed(f"{type(error).__name__}: {error}", seqs) from error
