"""One answer's text: tokens in, (reasoning, content) out, up to a stop string."""

from omlx.node.text.detokenize import Detokenizer
from omlx.node.text.stops import StopMatcher
from omlx.node.text.thinking import ThinkSplitter

Parts = tuple[str, str]
"""(reasoning, content)."""


class AnswerText:
    """Detokenizer, stop strings and reasoning in a row. Stop strings count in the reasoning too.

    `decoded` and `sent` are characters: out of the tokens so far, and of those past the stop strings.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: StopMatcher, splitter: ThinkSplitter | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._splitter = splitter
        self.decoded = 0
        self.sent = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: the parts given with it are the last."""
        return self._stops.stopped

    @property
    def inside(self) -> bool:
        """Within the reasoning."""
        return self._splitter is not None and self._splitter.inside

    def add(self, token: int) -> Parts:
        return self._split(self._match(self._detokenizer.add(token)), last=self.stopped)

    def finish(self) -> Parts:
        """What was held back. It may end in a stop string, so look at `stopped` again."""
        text = self._match(self._detokenizer.finish())
        if not self.stopped:
            tail = self._stops.finish()
            self.sent += len(tail)
            text += tail
        return self._split(text, last=True)

    def _match(self, text: str) -> str:
        self.decoded += len(text)
        passed = self._stops.feed(text)
        self.sent += len(passed)
        return passed

    def _split(self, text: str, last: bool) -> Parts:
        if self._splitter is None:
            return "", text
        reasoning, content = self._splitter.feed(text)
        if last:
            more_reasoning, more_content = self._splitter.finish()
            return reasoning + more_reasoning, content + more_content
        return reasoning, content
