"""The scheduler with kept prefixes under random operations, over simulated stages that keep and lay back.

A simulated stage knows of every token in its caches which tokens came before it, as keys and values do; what
it draws follows from all of them. So an answer is only right if everything that was laid back for it was.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch
from zlib import crc32

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.block import pack, root_of
from omlx.cache.prefix_index import PrefixIndex, Tier
from omlx.errors import Full
from omlx.ids import BlockId, SeqId
from omlx.node import prefixes
from omlx.node.hold import Hold
from omlx.node.prefixes import Prefixes
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.step import Keep, Restore, Sampled, SamplingParams, StepPlan, StepResult
from omlx.node.wire import BlockEntry, Catalogue, Held, Holds
from tests.node.test_scheduler import STOP, limits

BLOCK, SNAPSHOT = 32, 64
ROOT = root_of({"weights": "simulated"})
PLAIN, SLIDING, RECURRENT = "plain", "sliding", "recurrent"
STREAMS = [[(step * step * (stream + 3) + step) % 11 + 10 for step in range(400)] for stream in range(3)]
for stream in STREAMS[1:]:
    stream[: 3 * BLOCK] = STREAMS[0][: 3 * BLOCK]


def draw(tokens: Sequence[int]) -> int:
    """What the simulated model says next."""
    return crc32(pack(tokens)) % 20 + STOP


def text(prompt: Sequence[int], answer: int) -> list[int]:
    """With what it would say behind a stop token too: looking ahead computes that."""
    tokens = list(prompt)
    for _ in range(answer):
        tokens.append(draw(tokens))
    return tokens


@dataclass(frozen=True)
class Slab:
    """What a simulated stage holds of a block."""

    past: tuple[int, ...]
    """All tokens up to its end."""
    start: int
    restorable: bool

    @property
    def bytes(self) -> int:
        return 10 * (len(self.past) - self.start)


@dataclass(eq=False)
class SimulatedStage:
    kind: str
    rows: dict[SeqId, list[int]] = field(default_factory=dict)
    ends: dict[SeqId, Slab] = field(default_factory=dict)
    """The last block that was laid back for a sequence, until it is computed."""
    aside: dict[tuple[SeqId, int, int], Slab] = field(default_factory=dict)
    hot: dict[BlockId, Slab] = field(default_factory=dict)
    cold: dict[BlockId, tuple[BlockEntry, Slab]] = field(default_factory=dict)
    plans: deque[StepPlan] = field(default_factory=deque)
    done: int = 0
    """Plans of this epoch that are carried out."""
    reads: deque[BlockId] = field(default_factory=deque)
    writes: deque[BlockEntry | BlockId] = field(default_factory=deque)
    """To be written, or to be deleted."""
    told: deque[Holds | Catalogue] = field(default_factory=deque)
    """On the way to the head."""

    def carry_out(self, texts: dict[SeqId, list[int]]) -> StepResult:
        plan = self.plans.popleft()
        self.done += 1
        kept = [(keep.block, self._kept(keep)) for keep in plan.keeps]
        for seq in plan.drops:
            del self.rows[seq]
            self.ends.pop(seq, None)
            self.aside = {key: slab for key, slab in self.aside.items() if key[0] != seq}
        for admit in plan.admits:
            assert admit.seq not in self.rows
            self.rows[admit.seq] = []
        for restore in plan.restores:
            self._lay(restore, texts[restore.seq])
        drawn = []
        for piece in plan.slices:
            row = self.rows[piece.seq]
            assert len(row) == piece.start, "computed at the wrong place"
            last = self.ends.pop(piece.seq, None)
            assert last is None or self.kind == PLAIN or last.restorable, "nothing can go on from there"
            row += piece.tokens or (draw(row),)
            assert row == texts[piece.seq][: len(row)]
            if piece.sample:
                drawn.append(Sampled(piece.seq, draw(row)))
        for cut in plan.cuts:
            row = self.rows[cut.seq]
            assert not cut.snapshot or len(row) == cut.end
            restorable = cut.snapshot or self.kind == SLIDING
            self.aside[cut.seq, cut.start, cut.end] = Slab(tuple(row[: cut.end]), cut.start, restorable)
        if kept:
            held = [(id, self._put(id, slab)) for id, slab in kept]
            self.told.append(Holds("hot", tuple(Held(id, slab.bytes, slab.restorable) for id, slab in held)))
        for id in plan.evicts:
            self.hot.pop(id, None)
        if plan.evicts:
            self.told.append(Holds("hot", tuple(Held(id, 0) for id in plan.evicts), evicted=True))
        return StepResult(plan.id, plan.epoch, tuple(drawn))

    def _put(self, id: BlockId, slab: Slab) -> Slab:
        if id not in self.hot or slab.restorable > self.hot[id].restorable:
            self.hot[id] = slab
        return self.hot[id]

    def _kept(self, keep: Keep) -> Slab:
        if (slab := self.aside.pop((keep.seq, keep.start, keep.end), None)) is not None:
            return slab
        row = self.rows[keep.seq]
        assert len(row) >= keep.end
        return Slab(tuple(row[: keep.end]), keep.start, self.kind == PLAIN or len(row) == keep.end)

    def _lay(self, restore: Restore, right: list[int]) -> None:
        row = self.rows[restore.seq]
        assert len(row) == restore.start < restore.end <= restore.room
        for id in restore.blocks:
            assert id in self.hot, "a block to lay back is not here"
            slab = self.hot[id]
            assert len(row) == slab.start and tuple(row) == slab.past[: len(row)]
            assert self.kind == PLAIN or len(slab.past) <= restore.end, "a block that cannot be cut"
            row += slab.past[len(row) : restore.end]
        self.ends[restore.seq] = slab
        assert len(row) == restore.end and row == right[: len(row)]

    def read(self, *, fails: bool) -> None:
        id = self.reads.popleft()
        if id in self.hot:
            self.told.append(Holds("hot", (self._held(id),)))
            return
        if fails:
            self.cold.pop(id, None)
        if id in self.cold:
            self.hot[id] = self.cold[id][1]
        else:
            self.told.append(Holds("cold", (Held(id, 0),)))
        self.told.append(Holds("hot", (self._held(id),), 0.01))

    def _held(self, id: BlockId) -> Held:
        slab = self.hot.get(id)
        return Held(id, slab.bytes, slab.restorable) if slab else Held(id, 0)

    def write(self, *, fails: bool) -> None:
        job = self.writes.popleft()
        if not isinstance(job, BlockEntry):
            self.cold.pop(job, None)
            self.told.append(Holds("cold", (Held(job, 0),)))
            return
        if job.id in self.hot and not fails:
            before = self.cold.get(job.id)
            if before is None or before[1].restorable < self.hot[job.id].restorable:
                self.cold[job.id] = job, self.hot[job.id]
        if job.id in self.cold:
            slab = self.cold[job.id][1]
            self.told.append(Holds("cold", (Held(job.id, slab.bytes, slab.restorable),)))
        else:
            self.told.append(Holds("cold", (Held(job.id, 0),)))

    def end_epoch(self) -> None:
        self.rows.clear()
        self.ends.clear()
        self.aside.clear()
        self.plans.clear()
        self.done = 0

    def restart(self) -> None:
        """A new process: what was in RAM or on the way is gone."""
        for lost in (self.hot, self.reads, self.writes, self.told):
            lost.clear()
        found = sorted(self.cold.values(), key=lambda found: found[0].start)
        held = tuple(Held(entry.id, slab.bytes, slab.restorable) for entry, slab in found)
        self.told.append(Catalogue(tuple(entry for entry, _ in found), held))


class CachedSequences(RuleBasedStateMachine):
    """Whatever happens in whatever order: every answer is right, and the books agree with the stages."""

    @initialize(
        stages=st.integers(1, 3),
        kind=st.sampled_from([PLAIN, SLIDING, RECURRENT]),
        places=st.integers(1, 4),
        capacity=st.sampled_from([400, 2000]),
        mixes=st.booleans(),
        hot_blocks=st.integers(0, 40),
        cold=st.booleans(),
        restored=st.sampled_from([BLOCK // 2, BLOCK, 3 * BLOCK]),
    )
    def start(  # noqa: PLR0913 (hypothesis hands them in)
        self,
        stages: int,
        kind: str,
        places: int,
        capacity: int,
        mixes: bool,
        hot_blocks: int,
        cold: bool,
        restored: int,
    ) -> None:
        self.patches = [
            patch.object(prefixes, name, value)
            for name, value in (("RESTORED_TOKENS", restored), ("FETCHES", 3), ("SPILLS", 2))
        ]
        for one in self.patches:
            one.start()
        budget = hot_blocks * BLOCK * 10
        hold = Hold((budget,) * stages, cold, BLOCK, SNAPSHOT, kind == PLAIN, kind == RECURRENT)
        index = PrefixIndex(ROOT, BLOCK, stages, hold.trimmable)
        bounds = limits(places, stages, 3 * BLOCK, capacity, mixes, queue=8)
        self.scheduler = Scheduler(bounds, prefixes=Prefixes(index, hold))
        self.stages = [SimulatedStage(kind) for _ in range(stages)]
        self.results: deque[StepResult] = deque()
        self.texts: dict[SeqId, list[int]] = {}
        self.left: dict[SeqId, list[int]] = {}
        """What running and waiting answers have still to say."""
        self.said = [list(stream) for stream in STREAMS]
        """What a prompt may begin with."""

    @property
    def books(self) -> Prefixes:
        return self.scheduler.prefixes

    # ---------------------------------------------------------------- clients

    @rule(
        before=st.integers(0, 20),
        length=st.integers(1, 330),
        more=st.integers(0, 40),
        answer=st.integers(1, 50),
    )
    def ask(self, before: int, length: int, more: int, answer: int) -> None:
        prompt = self.said[before % len(self.said)][:length] + [more % 7 + 30] * more
        try:
            seq = self.scheduler.add(Request(tuple(prompt), SamplingParams(), answer, frozenset({STOP})))
        except Full:
            return
        self.texts[seq] = text(prompt, answer + 8)
        right = self.texts[seq][len(prompt) :][:answer]
        self.left[seq] = right[: right.index(STOP) + 1] if STOP in right else right

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.left)))
        self.scheduler.cancel(seq)
        del self.left[seq]

    # ---------------------------------------------------------------- the engine

    @rule()
    def plan(self) -> None:
        if (plan := self.scheduler.next_plan()) is not None:
            for stage in self.stages:
                stage.plans.append(plan)

    @precondition(lambda self: self.results)
    @rule()
    def commit(self) -> None:
        result = self.results.popleft()
        for seq, token in self.scheduler.commit(result):
            assert self.left[seq].pop(0) == token.id
            if token.finish is not None:
                assert not self.left.pop(seq)
                self.said.append(self.texts[seq])

    @rule()
    def look(self) -> None:
        self.hear_all()
        fetches, spills = self.scheduler.fetches(), self.books.spills()
        for stage in self.stages:
            stage.reads += fetches  # they may overtake plans
            stage.writes += spills

    def hear_all(self) -> None:
        for stage in self.stages:
            while stage.told:
                self.hear(stage)

    def hear(self, stage: SimulatedStage) -> None:
        message = stage.told.popleft()
        number = self.stages.index(stage)
        if isinstance(message, Catalogue):
            self.books.found(number, message)
        else:
            self.books.held(number, message)

    @rule(over=st.integers(0, 3000))
    def purge(self, over: int) -> None:
        purges = self.books.purges(over)
        for stage in self.stages:
            stage.writes += purges

    @rule(seconds=st.sampled_from([0.1, 0.6, 11.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.books.now += seconds

    @rule(lost=st.frozensets(st.integers(0, 2)))
    def lose(self, lost: Iterable[int]) -> None:
        """The epoch ends; of some stages the processes do too."""
        self.scheduler.rewind()
        self.results.clear()
        for number, stage in enumerate(self.stages):
            stage.end_epoch()
            if number in lost:
                stage.restart()
                self.books.lost(number)
        self.hear_all()

    # ---------------------------------------------------------------- the stages

    def may_step(self, number: int) -> bool:
        if number >= len(self.stages) or not self.stages[number].plans:
            return False
        stage = self.stages[number]
        return number == 0 or self.stages[number - 1].done > stage.done or not stage.plans[0].slices

    @rule(number=st.integers(0, 2))
    def step(self, number: int) -> None:
        if not self.may_step(number):
            return
        result = self.stages[number].carry_out(self.texts)
        if number == len(self.stages) - 1:
            self.results.append(result)

    @rule(number=st.integers(0, 2), fails=st.booleans())
    def read(self, number: int, fails: bool) -> None:
        if number < len(self.stages) and self.stages[number].reads:
            self.stages[number].read(fails=fails)

    @rule(number=st.integers(0, 2), fails=st.booleans())
    def write(self, number: int, fails: bool) -> None:
        if number < len(self.stages) and self.stages[number].writes:
            self.stages[number].write(fails=fails)

    @rule(number=st.integers(0, 2))
    def tell(self, number: int) -> None:
        if number < len(self.stages) and self.stages[number].told:
            self.hear(self.stages[number])

    @rule(turns=st.integers(1, 12), reads=st.booleans())
    def go_on(self, turns: int, reads: bool) -> None:
        """Some rounds as they are most of the time."""
        for _ in range(turns):
            self.turn(reads=reads)

    def turn(self, *, reads: bool) -> None:
        self.look()
        self.plan()
        for number, stage in enumerate(self.stages):
            while self.may_step(number):
                self.step(number)
            while reads and stage.reads:
                stage.read(fails=False)
            while reads and stage.writes:
                stage.write(fails=False)
        if self.results:
            self.commit()
        self.books.now += 0.3

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            self.books.index.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            self.everybody_finishes(reads=False)
            self.nothing_is_left()
            self.all_is_asked_again()
            self.nothing_is_left()
        finally:
            for one in self.patches:
                one.stop()

    def everybody_finishes(self, *, reads: bool) -> None:
        """Even if no disk says anything any more."""
        for _ in range(2000):
            if not self.left:
                break
            self.turn(reads=reads)
        assert not self.left, "somebody waits for ever"

    def all_is_asked_again(self) -> None:
        """After a restart of all stages, so that all there is lies on the SSD."""
        self.lose({0, 1, 2})
        for before in range(1, min(6, len(self.said)) + 1):
            self.ask(before=len(self.said) - before, length=400, more=before, answer=9)
        self.everybody_finishes(reads=True)

    def nothing_is_left(self) -> None:
        """Once all is answered, the books agree with the stages to the last block."""
        for _ in range(200):
            self.turn(reads=True)
        self.look()
        books, index = self.books, self.books.index
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.in_flight
        assert not books._keeping and not books._fetching and not books._spilling
        assert index.counts().pinned == 0
        for number, stage in enumerate(self.stages):
            assert index.used_bytes(number, Tier.HOT) == sum(slab.bytes for slab in stage.hot.values())
            assert all(number not in index.missing(id, Tier.HOT) for id in stage.hot)
            assert index.used_bytes(number, Tier.COLD) == sum(slab.bytes for _, slab in stage.cold.values())


TestCachedSequences = CachedSequences.TestCase
TestCachedSequences.settings = hypothesis_settings(max_examples=100, stateful_step_count=60, deadline=None)
