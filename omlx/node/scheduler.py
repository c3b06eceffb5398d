"""Which tokens are computed next: pure bookkeeping on the head, no clock, no socket, no array.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens issued, and each
plan lets the second catch up with the first within a token budget. Only slices of one token are
sampled, so a prompt is issued as chunks up to its last token and then that token alone, beside the
running answers' tokens.

Running sequences are dealt into `groups`. A group draws in one plan, so with as many groups as stages
every stage has a plan to work on. A group may be issued `ahead` times before the first of these plans is
committed: a draw's token need not come back to the head before the next step asks for it.
"""

from collections import deque
from dataclasses import dataclass, field

from omlx.errors import Full, OutOfStep
from omlx.ids import Epoch, PlanId, SeqId
from omlx.node.sequence import Finish, Request, Sequence, Token
from omlx.node.step import Admit, Slice, StepPlan, StepResult

FIRST_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may spend."""

    places: int
    """Sequences that run at once."""
    queue: int
    """Sequences that may wait for a place."""
    groups: int
    """Groups that the running sequences are dealt into: one per stage."""
    step_tokens: int
    """Prompt tokens per step while no answer waits for its next token."""
    mixed_step_tokens: int
    """Prompt tokens per step while one does; the answers' own tokens come on top, one each."""
    capacity_tokens: int
    """Tokens whose keys and values fit into the stages' memory, over all running sequences."""


@dataclass(slots=True)
class Scheduler:
    """Add, cancel, next_plan, commit, rewind. One owner: the engine's loop.

    A plan that `next_plan` returned must be carried out by every stage, and its result committed, in
    the same order.
    """

    limits: Limits
    ahead: int = 2
    """Plans of one group that may be in flight; 1: no look-ahead. The engine sets it as it goes."""
    epoch: Epoch = FIRST_EPOCH
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[SeqId, Sequence] = field(default_factory=dict)
    """In the order in which they got their places."""
    in_flight: deque[StepPlan] = field(default_factory=deque)
    _admitted: set[SeqId] = field(default_factory=set)
    _drops: list[SeqId] = field(default_factory=list)
    _next_seq: int = 0
    _next_plan: int = 0
    _turn: int = 0

    def add(self, request: Request) -> SeqId:
        """Queue a request. Raises Full when every place and the whole queue are taken."""
        free = self.limits.places - len(self.running)
        if len(self.waiting) >= self.limits.queue + free:
            raise Full(
                f"{len(self.running)} requests are running and {len(self.waiting)} are waiting; try again"
            )
        seq = SeqId(self._next_seq)
        self._next_seq += 1
        self.waiting.append(Sequence(seq, request, group=0, tokens=list(request.prompt)))
        return seq

    def cancel(self, seq: SeqId) -> None:
        """Forget a sequence, wherever it is; an unknown or ended one is no error."""
        if seq in self.running:
            self._leave(seq)
        else:
            self.waiting = deque(s for s in self.waiting if s.id != seq)

    def next_plan(self) -> StepPlan | None:
        """The next step, or None while there is nothing to do or enough is on its way."""
        if len(self.in_flight) >= self.limits.groups * self.ahead:
            return None
        self._make_room()
        self._give_places()
        # Chunks first: a prompt that they complete may be drawn from in the same step.
        chunks = self._chunks()
        singles = self._singles(self._next_group())
        if not (chunks or singles or self._drops):
            return None
        newcomers = [s for s in self.running.values() if s.id not in self._admitted]
        plan = StepPlan(
            id=PlanId(self._next_plan),
            epoch=self.epoch,
            drops=tuple(self._drops),
            admits=tuple(_admit(s) for s in newcomers),
            slices=tuple(chunks + singles),
            committed=self.in_flight[0].id if self.in_flight else PlanId(self._next_plan),
        )
        self._admitted.update(s.id for s in newcomers)
        self._drops.clear()
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
        for piece in plan.slices:
            if piece.seq in self.running:
                self.running[piece.seq].computed = piece.end
        tokens: list[tuple[SeqId, Token]] = []
        for drawn in result.sampled:
            sequence = self.running.get(drawn.seq)
            if sequence is None:
                continue  # cancelled while the plan was on its way
            sequence.tokens.append(drawn.token)
            finish = _finish(sequence, drawn.token)
            if finish is not None:
                self._leave(drawn.seq)
            tokens.append((drawn.seq, Token(drawn.token, drawn.logprob, drawn.top, finish)))
        return tokens

    def rewind(self) -> None:
        """After a lost stage: a new epoch, nothing computed, every known token stays."""
        self.epoch = Epoch(self.epoch + 1)
        self._next_plan = 0
        self.in_flight.clear()
        self._admitted.clear()
        self._drops.clear()
        for sequence in self.running.values():
            sequence.issued = sequence.computed = 0

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not agree. For tests."""
        assert len(self.running) <= self.limits.places
        flying = [piece for plan in self.in_flight for piece in plan.slices]
        for sequence in self.running.values():
            assert 0 <= sequence.computed <= min(sequence.issued, sequence.known)
            mine = [piece for piece in flying if piece.seq == sequence.id]
            assert sequence.issued - sequence.computed == sum(piece.end - piece.start for piece in mine)
            assert sequence.draws_in_flight == sum(piece.sample for piece in mine)
            assert sequence.issued < len(sequence.request.prompt) + sequence.request.max_tokens
            assert len(sequence.answer) < sequence.request.max_tokens
            assert 0 <= sequence.group < self.limits.groups
        assert not set(self._drops) & self._admitted
        assert all(s.issued == 0 and s.id not in self.running for s in self.waiting)

    def _leave(self, seq: SeqId) -> None:
        del self.running[seq]
        if seq in self._admitted:
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
            sequence.issued = sequence.computed = 0
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
            sizes = [0] * self.limits.groups
            for other in self.running.values():
                sizes[other.group] += 1
            sequence.group = sizes.index(min(sizes))
            self.running[sequence.id] = sequence

    def _flies(self, seq: SeqId) -> bool:
        """Whether a plan on its way still means this sequence as it was before it gave way."""
        return any(piece.seq == seq for plan in self.in_flight for piece in plan.slices)

    def _next_group(self) -> int | None:
        """Round robin over the groups that have a draw to issue and not too many on their way."""
        ready = {s.group for s in self.running.values() if s.may_draw}
        ready -= {s.group for s in self.running.values() if s.draws_in_flight >= self.ahead}
        for step in range(self.limits.groups):
            group = (self._turn + step) % self.limits.groups
            if group in ready:
                self._turn = (group + 1) % self.limits.groups
                return group
        return None

    def _chunks(self) -> list[Slice]:
        """Prompts advance in the order in which they got their places, within the step's budget."""
        decoding = any(s.issued >= s.known - 1 for s in self.running.values())
        budget = self.limits.mixed_step_tokens if decoding else self.limits.step_tokens
        chunks = []
        for sequence in self.running.values():
            size = min(budget, sequence.known - 1 - sequence.issued)
            if size <= 0:
                continue
            start, end = sequence.issued, sequence.issued + size
            chunks.append(Slice(sequence.id, tuple(sequence.tokens[start:end]), start, sample=False))
            sequence.issued = end
            budget -= size
        return chunks

    def _singles(self, group: int | None) -> list[Slice]:
        singles = []
        for sequence in self.running.values():
            if sequence.group == group and sequence.may_draw:
                start = sequence.issued
                singles.append(
                    Slice(sequence.id, tuple(sequence.tokens[start : start + 1]), start, sample=True)
                )
                sequence.issued = start + 1
        return singles


def _admit(sequence: Sequence) -> Admit:
    sampling = sequence.request.sampling
    if not sampling.needs_history:
        return Admit(sequence.id, sampling, (), ())
    return Admit(sequence.id, sampling, sequence.request.prompt, sequence.answer)


def _finish(sequence: Sequence, token: int) -> Finish | None:
    if token in sequence.request.stop_tokens:
        return Finish.STOP
    if len(sequence.answer) >= sequence.request.max_tokens:
        return Finish.LENGTH
    return None
