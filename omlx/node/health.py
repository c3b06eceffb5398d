"""What a served model says about itself: its card and its health. Plain values, for the API to show."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from omlx.ids import ModelId

ModelState: TypeAlias = Literal["idle", "loading", "ready", "recovering", "stalled", "failed"]
"""idle: not loaded, the first request loads it; recovering: a lost stage is being started again;
stalled: requests run but no step ends; failed: given up."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One line of the list of models."""

    id: ModelId
    created: int
    """Unix time in seconds."""
    context_tokens: int
    """Longest prompt and answer together."""
    state: ModelState


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """Whether a model makes progress, not just whether its processes live."""

    id: ModelId
    state: ModelState
    running: int
    """Requests in the batch."""
    waiting: int
    """Requests in the queue."""
    seconds_since_progress: float | None
    """Since the last step ended; None before the first one."""
