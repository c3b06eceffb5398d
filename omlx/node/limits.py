"""What a scheduler may spend, and what follows from it alone."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may spend."""

    places: int
    """Sequences that run at once."""
    queue: int
    """Sequences that may wait for a place."""
    stages: int
    step_tokens: int
    """Most prompt tokens per step; the answers' own tokens come on top, one each."""
    slowdown: float
    """While prompts are computed, running answers' tokens may come so many times slower."""
    capacity_tokens: int
    """Tokens whose keys and values fit into the stages' memory, over all running sequences."""
    mixes: bool = False
    """Whether a stage computes chunks and single tokens in one forward; then a prompt's last chunk is
    drawn from. Else only slices of one token are."""

    def lanes_apart(self, groups: int) -> int:
        """Plans of chunks alone in a round; 0: the groups' own plans carry them."""
        if not groups:
            return self.stages
        # A group behind a chunk is as slow as the chunk on the other stages: so many more fit in between.
        return 0 if self.stages == 1 or (self.mixes and groups >= self.stages) else self.stages - 1
