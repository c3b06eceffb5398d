"""The error tree. What a caller may do next is told by the class alone.

    OmlxError
    ├── Refused                never will: something in the request or the set-up must change
    │   ├── BadSetting         a flag, an environment variable or a line of the settings file
    │   ├── BadModel           a model folder that cannot be served; names the file
    │   │   └── CannotSplit    it can be served whole, but not cut into stages
    │   ├── DoesNotFit         the manifest's arithmetic against the memory there is
    │   ├── ModelNotFound      no such model id here
    │   └── BadRequest         a request's field; names the field
    │       └── PromptTooLong  more tokens than the model's context holds
    ├── Full                   try later: the queue is full
    ├── ModelFailed            the model's stages died too often; others go on
    │   └── NodesAway          the machines that are left cannot hold it; it comes back with them
    ├── StageLost              inside a pipeline: ends the epoch, never reaches a client
    │   ├── LinkLost           the neighbour's end of a link is gone
    │   ├── OutOfStep          a frame of another step or another shape than the plan says
    │   ├── TooLate            a deadline passed
    │   └── StepFailed         some sequences cannot be computed; the stage itself is well
    ├── SshFailed              another machine cannot be reached, recognised or entered over SSH
    ├── RayFailed              Ray's processes, or the driver that speaks to them, do not start or answer
    ├── RequestFailed          one request could not be computed; others go on
    └── Closed                 we closed it ourselves

On the command line a `Refused` is one line and exit code 2. Over HTTP `api/errors.py` has the one table.
"""

from omlx.ids import SeqId


class OmlxError(Exception):
    """The root; `str(error)` is one sentence for a person: what, where, what to do."""


class Refused(OmlxError):
    """It will never work like this."""


class BadSetting(Refused):
    """A setting is out of range, unknown, or contradicts another one."""


class BadModel(Refused):
    """The model folder is broken or of an unknown kind; the message names the file."""


class CannotSplit(BadModel):
    """This family cannot be cut into stages; one stage serves it whole."""


class DoesNotFit(Refused):
    """Too few bytes of memory. `short_bytes` says by how many."""

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class ModelNotFound(Refused):
    """No model of that id is served here."""


class BadRequest(Refused):
    """A field of a request. `param` names it as the client wrote it (`messages[0].content`)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(BadRequest):
    """The prompt has more tokens than the context."""

    def __init__(self, prompt_tokens: int, context_tokens: int, param: str = "messages") -> None:
        super().__init__(
            f"prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum",
            param=param,
            code="context_length_exceeded",
        )


class Full(OmlxError):
    """Every place is taken and so is the queue. `retry_after_s` is a guess, in seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelFailed(OmlxError):
    """A model whose stages died too often within a minute."""


class NodesAway(ModelFailed):
    """A model that waits for a machine to come back."""


class StageLost(OmlxError):
    """A stage or the way to it is gone. `stage` is its index in the pipeline, 0 first."""

    def __init__(self, message: str, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class LinkLost(StageLost):
    """The other end of a link closed or reset it."""


class OutOfStep(StageLost):
    """A frame does not belong where it arrived."""


class TooLate(StageLost):
    """Nothing came before the deadline."""


class StepFailed(StageLost):
    """MLX raised while it computed the sequences `seqs`."""

    def __init__(self, message: str, seqs: tuple[SeqId, ...], stage: int | None = None) -> None:
        super().__init__(message, stage)
        self.seqs = seqs


class SshFailed(OmlxError):
    """Over SSH it goes no further. `what` names the step, `seen`, `wanted` and `fix` say the rest.

    fingerprint: of the host key that the machine showed, where it came to that.
    """

    def __init__(self, what: str, seen: str, wanted: str, fix: str, fingerprint: str | None = None) -> None:
        super().__init__(f"{what}: {seen}; {fix}")
        self.what = what
        self.seen = seen
        self.wanted = wanted
        self.fix = fix
        self.fingerprint = fingerprint


class RayFailed(OmlxError):
    """Ray does not start, or does not do what it was asked to."""


class RequestFailed(OmlxError):
    """The model cannot compute this one request."""


class Closed(OmlxError):
    """Used after we closed it."""
