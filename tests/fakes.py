"""Stand-ins that keep their contract strictly, so that a caller who breaks it fails here."""

from collections.abc import AsyncIterator, Iterable

from omlx.node.sequence import Finish, Request, Token


class ScriptedSource:
    """An engine that gives the same tokens to every request.

    A bare id is given as the engine would: with STOP if it is one of the request's stop tokens, with LENGTH
    if it is the last one allowed, with log-probabilities if asked. A `Token` is given as it is. After the
    script comes `fails`, or the stream ends short, as it does when a model is unloaded.
    """

    def __init__(
        self,
        tokens: Iterable[int | Token],
        fails: Exception | None = None,
        refuses: Exception | None = None,
        cached_tokens: int = 0,
    ) -> None:
        self.tokens = tuple(tokens)
        self.fails = fails
        self.refuses = refuses
        self.cached_tokens = cached_tokens
        self.requests: list[Request] = []
        self.streams: list[ScriptedStream] = []

    @property
    def closes(self) -> list[int]:
        """How many tokens had been read of each stream that was cancelled."""
        return [stream.read for stream in self.streams if stream.cancelled]

    def submit(self, request: Request) -> "ScriptedStream":
        assert type(request.prompt) is tuple and request.prompt, "a prompt is a tuple with something in it"
        assert all(type(id) is int and id >= 0 for id in request.prompt)
        assert request.max_tokens >= 1
        assert 0 <= request.sampling.seed < 2**63
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        stream = ScriptedStream(self, request)
        self.streams.append(stream)
        return stream


class ScriptedStream:
    def __init__(self, source: ScriptedSource, request: Request) -> None:
        self.source = source
        self.request = request
        self.read = 0
        self.ended = False
        self.cancelled = False
        self.cached_tokens = 0

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        assert not self.cancelled, "read after it was closed"
        assert not self.ended, "read after its last token"
        self.cached_tokens = self.source.cached_tokens
        if self.read == len(self.source.tokens):
            self.ended = True
            if self.source.fails is not None:
                raise self.source.fails
            raise StopAsyncIteration
        entry = self.source.tokens[self.read]
        self.read += 1
        token = entry if isinstance(entry, Token) else self._drawn(entry)
        self.ended = token.finish is not None
        assert self.ended or self.read < self.request.max_tokens, "the script outruns max_tokens"
        return token

    async def aclose(self) -> None:
        assert not self.cancelled, "closed twice"
        self.cancelled = not self.ended
        self.ended = True

    def _drawn(self, id: int) -> Token:
        wanted = self.request.sampling.top_logprobs
        finish = None
        if id in self.request.stop_tokens:
            finish = Finish.STOP
        elif self.read == self.request.max_tokens:
            finish = Finish.LENGTH
        if wanted is None:
            return Token(id, finish=finish)
        top = tuple((id + n, -1.0 - n) for n in range(wanted))
        return Token(id, logprob=-1.0, top=top, finish=finish)
