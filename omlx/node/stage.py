"""One stage of the pipeline: it obeys step plans in order. Source -> layers -> sink.

A stage without a source embeds tokens, one without a sink draws the next ones; first, middle, last and
only stage are this one class. It knows no sockets and no head.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from omlx.errors import OutOfStep, StepFailed
from omlx.ids import Epoch
from omlx.node.links import Link
from omlx.node.rows import Rows
from omlx.node.sampling import Sampler
from omlx.node.slicing import Cut
from omlx.node.step import Sampled, Slice, StepPlan, StepResult
from omlx.node.wire import Tag


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

    def __post_init__(self) -> None:
        self.rows = Rows(self.cut)

    def begin(self, epoch: Epoch, source: Link | None, sink: Link | None) -> None:
        """A new epoch: no sequences, weights kept. Raises OutOfStep where the ends do not fit the span."""
        if (source is None) != self.cut.first or (sink is None) != self.cut.last:
            raise OutOfStep(f"layers {self.cut.start} to {self.cut.end} with the wrong neighbours")
        self.close()
        self.epoch, self.source, self.sink, self.next_plan = epoch, source, sink, 0

    def close(self) -> None:
        """Drop every sequence and hang up on the neighbours."""
        self.rows.clear()
        self.sampler.clear()
        mx.clear_cache()
        for link in (self.source, self.sink):
            if link is not None:
                link.close()
        self.source = self.sink = self.epoch = None

    def step(self, plan: StepPlan) -> StepResult | None:
        """Carry out one plan: drop, admit, compute. The last stage returns what was drawn.

        Raises StageLost (LinkLost, TooLate, OutOfStep, StepFailed): the epoch is over, this stage may
        begin another.
        """
        if (plan.epoch, plan.id) != (self.epoch, self.next_plan):
            raise OutOfStep(f"plan {plan.id} of epoch {plan.epoch}, {self.next_plan} of {self.epoch} was due")
        self.next_plan += 1
        for seq in plan.drops:
            self.rows.drop(seq)
            if self.cut.last:
                self.sampler.drop(seq)
        for admit in plan.admits:
            self.rows.admit(admit.seq)
            if self.cut.last:
                self.sampler.admit(admit)
        drawn: list[Sampled] = []
        for part, slices in enumerate(plan.batches()):
            try:
                drawn += self._forward(Tag(plan.epoch, plan.id, part), slices)
            except (ValueError, RuntimeError) as error:
                # What MLX and the models raise. Neither the plan nor the process is to blame, and the
                # other sequences must not pay for it more than once.
                seqs = tuple(piece.seq for piece in slices)
                raise StepFailed(f"{type(error).__name__}: {error}", seqs) from error
        return StepResult(plan.id, plan.epoch, tuple(drawn)) if self.cut.last else None

    def _forward(self, tag: Tag, slices: tuple[Slice, ...]) -> tuple[Sampled, ...]:
        """One model call. Neighbouring stages agree on `tag`, so nothing else needs saying."""
        source = self.source
        x = source.take(tag) if source is not None else mx.array([piece.tokens for piece in slices])
        caches = self.rows.together([piece.seq for piece in slices])
        out = self.cut(x, caches)
        states = [cache.state for cache in caches]
        if self.sink is not None:
            mx.eval(out, states)
            self.sink.give(tag, out)
            return ()
        if not slices[0].sample:
            # The head is lazy: a chunk of a prompt costs this stage its layers alone.
            mx.eval(states)
            return ()
        logits = out[:, -1, :]
        mx.async_eval(logits, states)
        return self.sampler.draw(logits, slices)
