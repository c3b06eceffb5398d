"""Stop strings, found across token borders."""


class StopMatcher:
    """Lets text through up to the match that begins first, whatever the chunks.

    Nothing of the stop string or after it gets out. Text that may yet turn out to be the beginning of one
    is held back. Where two stop strings overlap, the one that begins first counts, so the shorter one inside
    it waits until the longer one is complete or out of the question.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` must not hold an empty string."""
        self._tracks = [_Track(stop) for stop in stops]
        self._held = ""
        self._sent = 0
        self._seen = 0
        self._match: int | None = None
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be sent now."""
        if not self._tracks:
            return text
        if self.stopped:
            return ""
        self._held += text
        for char in text:
            self._step(char)
            if self._match is not None and self._match <= self._earliest_open():
                return self._stop(self._match)
        return self._release(min(self._earliest_open(), self._seen))

    def finish(self) -> str:
        """The text held back, up to a match that was waiting for an earlier one to complete."""
        if self._match is not None and not self.stopped:
            return self._stop(self._match)
        return self._release(self._seen)

    def _step(self, char: str) -> None:
        self._seen += 1
        for track in self._tracks:
            if track.step(char):
                start = self._seen - len(track.stop)
                self._match = start if self._match is None else min(self._match, start)

    def _earliest_open(self) -> int:
        """Where the earliest text begins that may still become a match; the end if there is none."""
        return min(self._seen - track.matched for track in self._tracks)

    def _stop(self, match: int) -> str:
        self.stopped = True
        part = self._release(match)
        self._held = ""
        return part

    def _release(self, end: int) -> str:
        """The held text before `end`; all places count characters from the beginning of the answer."""
        size = end - self._sent
        part, self._held = self._held[:size], self._held[size:]
        self._sent = end
        return part


class _Track:
    """How much of one stop string the text ends with: Knuth, Morris and Pratt's automaton."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * (len(stop) + 1)
        size = 0
        for place in range(1, len(stop)):
            while size and stop[place] != stop[size]:
                size = self._fallback[size]
            size += stop[place] == stop[size]
            self._fallback[place + 1] = size

    def step(self, char: str) -> bool:
        """Whether the stop string ends with this character. `matched` is then what a next one could use."""
        while self.matched and char != self.stop[self.matched]:
            self.matched = self._fallback[self.matched]
        self.matched += char == self.stop[self.matched]
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[self.matched]
        return True
