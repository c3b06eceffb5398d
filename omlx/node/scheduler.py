"""Which tokens are computed next: pure bookkeeping on the head, no clock, no socket, no array.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens issued, and each
plan lets the second catch up with the first. How far prompts get in a plan, and how many plans the running
answers are dealt over, follows from what the stages were measured to take (pacing.py, chunks.py).

A group draws in one plan. It may be issued `ahead` times before the first of these plans is committed: a
draw's token need not come back to the head before the next step asks for it. With fewer groups than stages,
prompts' chunks have the plans in between to themselves, where a stage would be idle.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from omlx.errors import Full, OutOfStep
from omlx.ids import BlockId, Epoch, PlanId, SeqId
from omlx.node.chunks import Prompt, budget_of, deal, swelled
from omlx.node.following import leader, waits
from omlx.node.limits import Limits
from omlx.node.pacing import Pace
from omlx.node.prefixes import Prefixes, nothing_kept
from omlx.node.sequence import Request, Sequence, Token
from omlx.node.step import Cut, Keep, Restore, Slice, StepPlan, StepResult

FIRST_EPOCH = Epoch(0)
MOST_SUSPECTED = 3
FETCHED_AHEAD = 4
"""Waiting requests whose prefixes are read from the SSD already."""
WAITED_FOR, WAITED_S = 2048, 4.0
"""Tokens, in all, of answers that a loss cut off: with more to compute, nobody waits for them. And how long
they are waited for: a disk may be slow to give what is laid back, or the stages to compute."""


@dataclass(slots=True)
class Scheduler:
    """Add, cancel, next_plan, commit, rewind. One owner: the engine's loop.

    A plan that `next_plan` returned must be carried out by every stage, and its result committed, in
    the same order.
    """

    limits: Limits
    ahead: int = 2
    """Plans of one group that may be in flight; 1: no look-ahead. The engine sets it as it goes."""
    pace: Pace = field(default_factory=Pace)
    """What the stages are known to take; the engine sets it as it goes."""
    prefixes: Prefixes = field(default_factory=nothing_kept)
    """What is kept of computed prefixes; the engine sets it once, and its clock."""
    groups: int = 1
    """Groups that the decoding sequences are dealt into."""
    epoch: Epoch = FIRST_EPOCH
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[SeqId, Sequence] = field(default_factory=dict)
    """In the order in which they got their places."""
    in_flight: deque[StepPlan] = field(default_factory=deque)
    _admitted: set[SeqId] = field(default_factory=set)
    _drops: list[SeqId] = field(default_factory=list)
    _keeps: list[Keep] = field(default_factory=list)
    _next_seq: int = 0
    _next_plan: int = 0
    _turn: int = 0
    _wait_until: float = inf
    """For whom a loss cut off; on the clock of `prefixes`, from the first plan after it."""
    _swell: float = 0.0
    """What part of its time the latest chunk beside running answers had. A longer chunk than the one before
    is felt on every stage at once, so they grow to their length step by step."""

    def add(self, request: Request) -> SeqId:
        """Queue a request. Raises Full when every place and the whole queue are taken."""
        free = self.limits.places - len(self.running)
        if len(self.waiting) >= self.limits.queue + free:
            raise Full(
                f"{len(self.running)} requests are running and {len(self.waiting)} are waiting; try again"
            )
        seq = SeqId(self._next_seq)
        self._next_seq += 1
        self.waiting.append(Sequence(seq, request, tokens=list(request.prompt)))
        return seq

    def cancel(self, seq: SeqId) -> None:
        """Forget a sequence, wherever it is; an unknown or ended one is no error."""
        if seq in self.running:
            self._leave(seq)
        else:
            for sequence in self.waiting:
                if sequence.id == seq:
                    self.prefixes.leave(sequence)
            self.waiting = deque(s for s in self.waiting if s.id != seq)

    def next_plan(self) -> StepPlan | None:
        """The next step, or None while there is nothing to do or enough is on its way."""
        self._make_room()
        self._give_places()
        restores = self._restores()
        self._deal_groups()
        group, with_chunks = self._next_lane()
        # A sequence whose prompt this plan completes is not in it a second time.
        singles = self._singles(group)
        chunks = self._chunks() if with_chunks else []
        if chunks:
            self._swell = swelled(self._swell, self.limits.stages)
        elif not self._prompts():
            self._swell = 0.0
        evicts = self.prefixes.evicts()
        # Housekeeping alone is worth a plan where no other follows soon.
        if not (chunks or singles or restores or evicts) and (
            self.in_flight or not (self._drops or self._keeps)
        ):
            return None
        newcomers = [s for s in self.running.values() if s.id not in self._admitted]
        plan = StepPlan(
            id=PlanId(self._next_plan),
            epoch=self.epoch,
            drops=tuple(self._drops),
            admits=tuple(s.admit() for s in newcomers),
            slices=tuple(chunks + singles),
            committed=self.in_flight[0].id if self.in_flight else PlanId(self._next_plan),
            keeps=tuple(self._keeps),
            restores=tuple(restores),
            cuts=self._cuts(chunks + singles),
            evicts=evicts,
        )
        self._admitted.update(s.id for s in newcomers)
        self._drops.clear()
        self._keeps.clear()
        self._next_plan += 1
        self.in_flight.append(plan)
        return plan

    def commit(self, result: StepResult) -> list[tuple[SeqId, Token]]:
        """Take the oldest plan's result in; returns the new tokens of sequences that still run.

        Raises OutOfStep when it is not the oldest plan's.
        """
        plan = self.in_flight[0] if self.in_flight else None
        if plan is None or (plan.id, plan.epoch) != (result.plan, result.epoch):
            raise OutOfStep(
                f"a result of plan {result.plan} of epoch {result.epoch}, which is not the next one"
            )
        self.in_flight.popleft()
        for piece in _parts(plan):
            if piece.seq in self.running:
                self.running[piece.seq].computed = piece.end
        tokens: list[tuple[SeqId, Token]] = []
        for drawn in result.sampled:
            sequence = self.running.get(drawn.seq)
            if sequence is None:
                continue  # cancelled while the plan was on its way
            sequence.tokens.append(drawn.token)
            finish = sequence.finish(drawn.token)
            if finish is not None:
                self._leave(drawn.seq)
            tokens.append((drawn.seq, Token(drawn.token, drawn.logprob, drawn.top, finish)))
        for piece in plan.slices:
            if piece.seq in self.running:
                self._keeps += self.prefixes.keeps(self.running[piece.seq], last=False)
        return tokens

    @property
    def decoding(self) -> int:
        """How many answers are on their way."""
        return sum(s.decodes for s in self.running.values())

    def suspect(self, seqs: Collection[SeqId]) -> list[SeqId]:
        """One of these cannot be computed, nobody knows which: after the rewind each runs alone until it has
        its next token. Returns those that this happened to too often."""
        guilty = []
        for seq in seqs:
            if (sequence := self.running.get(seq)) is not None:
                sequence.suspected += 1
                sequence.alone_until = sequence.known + 1
                if sequence.suspected > MOST_SUSPECTED:
                    guilty.append(seq)
        return guilty

    def rewind(self) -> None:
        """After a lost stage: a new epoch, nothing computed, every known token stays."""
        self.epoch = Epoch(self.epoch + 1)
        self._next_plan = 0
        for restore in (r for plan in self.in_flight for r in plan.restores):
            self.prefixes.distrust(restore.blocks)
            if restore.seq in self.running:
                self.running[restore.seq].distrusts = True
        self.in_flight.clear()
        self._admitted.clear()
        self._drops.clear()
        self._keeps.clear()
        for sequence in (*self.running.values(), *self.waiting):
            self._restart(sequence)
        for sequence in self.running.values():
            sequence.cut_off = bool(sequence.answer)
        self._wait_until = inf
        self.prefixes.rewind()

    def shrink(self) -> list[SeqId]:
        """After the capacity has become less: answers end earlier; returns who has too much already."""
        everybody = (*self.running.values(), *self.waiting)
        return [one.id for one in everybody if not one.shrink(self.limits.capacity_tokens)]

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not agree. For tests."""
        assert len(self.running) <= self.limits.places
        flying = [piece for plan in self.in_flight for piece in plan.slices]
        for sequence in self.running.values():
            assert 0 <= sequence.computed <= min(sequence.issued, sequence.known)
            mine = [piece for piece in flying if piece.seq == sequence.id]
            on_its_way = [p for plan in self.in_flight for p in _parts(plan) if p.seq == sequence.id]
            assert sequence.issued - sequence.computed == sum(p.end - p.start for p in on_its_way)
            assert sequence.draws_in_flight == sum(piece.sample for piece in mine)
            assert sequence.issued < len(sequence.request.prompt) + sequence.request.max_tokens
            assert len(sequence.answer) < sequence.request.max_tokens
            assert not sequence.decodes or sequence.group >= 0
        assert not set(self._drops) & self._admitted
        assert all(s.issued == 0 and s.id not in self.running for s in self.waiting)

    def _leave(self, seq: SeqId) -> None:
        sequence = self.running.pop(seq)
        self.prefixes.leave(sequence)
        if seq in self._admitted:
            self._keeps += self.prefixes.keeps(sequence, last=True)
            self._admitted.remove(seq)
            self._drops.append(seq)

    def _make_room(self) -> None:
        """Send the youngest sequences back to the queue while keys and values overflow.

        Their known tokens stay, and are computed anew when there is room; draws on their way are thrown
        away and come out the same again. The oldest always stays, so somebody always finishes.
        """
        total = sum(s.known for s in self.running.values())
        for sequence in list(self.running.values())[:0:-1]:
            if total <= self.limits.capacity_tokens:
                return
            self._leave(sequence.id)
            self._restart(sequence)
            self.waiting.appendleft(sequence)
            total -= sequence.known

    def _give_places(self) -> None:
        """First come, first served: the head of the queue waits for room, nobody overtakes it."""
        total = sum(s.known for s in self.running.values())
        while self.waiting and len(self.running) < self.limits.places:
            sequence = self.waiting[0]
            total += sequence.known
            if (self.running and total > self.limits.capacity_tokens) or self._flies(sequence.id):
                return
            self.waiting.popleft()
            self.running[sequence.id] = sequence
            self._begin(sequence)
            self.prefixes.counters.lookups += 1
            sequence.follows = leader(sequence, self.running.values(), self.prefixes.hold.step_tokens)

    def _begin(self, sequence: Sequence) -> None:
        sequence.begun = True
        self.prefixes.begin(sequence, self._block_s(sequence.known // 2))

    def _block_s(self, prefix: int) -> float:
        """What a block behind such a prefix is thought to take the stages to compute; 0: nobody knows."""
        return self.pace.added(self.prefixes.hold.block_tokens, prefix) if self.pace.stages else 0.0

    def _restart(self, sequence: Sequence) -> None:
        """Nothing of it is in any stage's caches."""
        self.prefixes.leave(sequence)
        sequence.begun = sequence.prompt_kept = sequence.cut_off = False
        sequence.issued = sequence.computed = 0

    def fetches(self) -> tuple[BlockId, ...]:
        """Blocks that the stages should read from their SSDs now: for those that have places first."""
        for sequence in (*self.running.values(), *islice(self.waiting, FETCHED_AHEAD)):
            if not sequence.begun:
                self._begin(sequence)
        return self.prefixes.fetches((*self.running.values(), *islice(self.waiting, FETCHED_AHEAD)))

    def _restores(self) -> list[Restore]:
        restores = []
        alone = not self.decoding
        for sequence in self.running.values():
            if not sequence.begun:
                self._begin(sequence)
            if sequence.restoring and (restore := self.prefixes.restore(sequence, alone)) is not None:
                restores.append(restore)
        return restores

    def _cuts(self, slices: list[Slice]) -> tuple[Cut, ...]:
        return self.prefixes.hold.cuts(slices, lambda seq: len(self.running[seq].request.prompt))

    def _flies(self, seq: SeqId) -> bool:
        """Whether a plan on its way still means this sequence as it was before it gave way."""
        return any(part.seq == seq for plan in self.in_flight for part in _parts(plan))

    def _active(self) -> list[Sequence]:
        """Who may be in a plan: everybody, or one suspect alone."""
        suspects = [s for s in self.running.values() if s.known < s.alone_until]
        return suspects[:1] or list(self.running.values())

    def _deal_groups(self) -> None:
        """As many groups as the fit says, of equal size, with as few moves as that takes."""
        rows = [s for s in self._active() if s.decodes]
        self.groups = self.pace.groups(len(rows), self.groups, self.limits.stages)
        sizes = Counter({group: 0 for group in range(self.groups)})
        most = -(-len(rows) // self.groups)
        strays = []
        for sequence in rows:
            if sequence.group < self.groups and sizes[sequence.group] < most:
                sizes[sequence.group] += 1
            else:
                strays.append(sequence)
        for sequence in strays:
            sequence.group = min(sizes, key=sizes.__getitem__)
            sizes[sequence.group] += 1

    def _next_lane(self) -> tuple[int | None, bool]:
        """Whose turn it is: the group that draws, and whether chunks are computed in this plan.

        A round is one plan of each group, then the plans of chunks alone. Lanes come strictly in turn: stages
        compute plans in order, so two plans of one group next to each other would wait for its draw. A lane
        whose plans are on their way is waited for, not passed over.
        """
        rows = self._rows()
        wanting = {s.group for s in rows}
        full = {s.group for s in rows if s.draws_in_flight >= self.ahead}
        prompts = bool(self._prompts())
        groups = self.groups if rows else 0
        apart = self.limits.lanes_apart(groups) if prompts else 0
        carriers = sum(any(not p.sample or len(p.tokens) > 1 for p in plan.slices) for plan in self.in_flight)
        room = carriers < 2 * (apart or groups)
        lanes = groups + apart
        for step in range(lanes):
            lane = (self._turn + step) % lanes
            with_chunks = prompts and (lane >= groups or not apart)
            if lane not in wanting and not with_chunks:
                continue
            if lane in full or (with_chunks and not room):
                return None, False
            self._turn = (lane + 1) % lanes
            return (lane if lane < groups else None), with_chunks
        return None, False

    def _rows(self) -> list[Sequence]:
        """Who draws. Who has the last token on its way feels nothing any more."""
        return [] if self._cut_off() else [s for s in self._active() if s.may_draw]

    def _cut_off(self) -> bool:
        """Whether short answers that a loss cut off are computed again: those that go on already wait, for
        each of their tokens would make the others' pause longer."""
        late = [s.known - s.issued for s in self._active() if s.cut_off and not s.decodes]
        short = [left for left in late if left <= self.limits.step_tokens]
        if not short:
            return False
        self._wait_until = min(self._wait_until, self.prefixes.now + WAITED_S)
        if sum(short) <= WAITED_FOR and self.prefixes.now <= self._wait_until:
            return True
        for sequence in self.running.values():
            sequence.cut_off = False
        return False

    def _prompts(self) -> list[Sequence]:
        return [s for s in self._active() if s.computes and not waits(s, self.running)]

    def _chunks(self) -> list[Slice]:
        """Prompts advance in the order in which they got their places."""
        for sequence in self._prompts():
            # What others have computed meanwhile need not be computed again.
            if not sequence.issued and sequence.looked_at != self.prefixes.kept:
                self._begin(sequence)
        prompts = self._prompts()
        held_back = 0 if self.limits.mixes else 1
        left = [Prompt(s.issued, s.known - s.issued - held_back) for s in prompts]
        budget = budget_of(self.pace, self.limits, left, len(self._rows()), self.groups, self._swell)
        sizes = deal(left, budget, self.limits.step_tokens)
        chunks = []
        for sequence, size in zip(prompts, sizes, strict=True):
            if size:
                start = sequence.issued
                end = self.prefixes.hold.chunk_end(start, start + size)
                piece = tuple(sequence.tokens[start:end])
                chunks.append(Slice(sequence.id, piece, start, sample=end == sequence.known))
                self.prefixes.counters.missed_tokens += end - start
                sequence.issued = end
        return chunks

    def _singles(self, group: int | None) -> list[Slice]:
        singles = []
        for sequence in self._active():
            if sequence.decodes and sequence.group == group and sequence.may_draw:
                start = sequence.issued
                singles.append(
                    Slice(sequence.id, tuple(sequence.tokens[start : start + 1]), start, sample=True)
                )
                sequence.issued = start + 1
        return singles


def _parts(plan: StepPlan) -> list[Slice | Restore]:
    """What makes sequences longer."""
    return [*plan.restores, *plan.slices]
