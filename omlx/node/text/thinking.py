"""Reasoning told apart from the answer, by its tags."""

from enum import Enum, auto

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"
_NEWLINES = "\r\n"


def leaves_open(prompt: str) -> bool:
    """Whether the prompt's last word is the open tag, so that the answer begins inside the reasoning."""
    return prompt.rstrip().endswith(OPEN_TAG)


class _Place(Enum):
    BEFORE = auto()
    """Nothing but white space yet: reasoning may begin."""
    OPENED = auto()
    """Right after an open tag: line breaks are dropped."""
    INSIDE = auto()
    ANSWER = auto()
    """For good: a tag that the answer mentions is part of it."""


class ThinkSplitter:
    """Reasoning comes first: between the tags, as long as the answer has not begun.

    Line breaks right after either tag and right before the closing one belong to neither part, nor does
    white space before an open tag. Only what may be part of a tag or of such white space is held back.
    """

    def __init__(self, open_tag: str, close_tag: str, inside: bool) -> None:
        """`inside`: the prompt has opened the reasoning already."""
        self._open = open_tag
        self._close = close_tag
        self._place = _Place.OPENED if inside else _Place.BEFORE
        self._closed = False
        self._held = ""

    @property
    def inside(self) -> bool:
        return self._place in (_Place.OPENED, _Place.INSIDE)

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that is certain now."""
        self._held += text
        reasoning = ""
        while True:
            match self._place:
                case _Place.BEFORE if self._waits_to_begin():
                    return reasoning, ""
                case _Place.OPENED if not self._drop_newlines():
                    return reasoning, ""
                case _Place.INSIDE:
                    part, closed = self._reason()
                    reasoning += part
                    if not closed:
                        return reasoning, ""
                case _Place.ANSWER:
                    return reasoning, self._take(len(self._held))

    def finish(self) -> tuple[str, str]:
        """(reasoning, content) held back, now that no more text comes."""
        inside = self.inside
        if self._place is _Place.BEFORE and self._closed:
            self._drop_newlines()
        held = self._take(len(self._held))
        return (held, "") if inside else ("", held)

    def _waits_to_begin(self) -> bool:
        """Whether it is still open what comes; if not, the place has moved on."""
        word = self._held.lstrip()
        if word.startswith(self._open):
            self._held = word[len(self._open) :]
            self._place = _Place.OPENED
            return False
        if self._open.startswith(word):
            return True
        if self._closed:
            self._drop_newlines()
        self._place = _Place.ANSWER
        return False

    def _drop_newlines(self) -> bool:
        """Whether something is left; then an opened reasoning has begun."""
        self._held = self._held.lstrip(_NEWLINES)
        if self._held and self._place is _Place.OPENED:
            self._place = _Place.INSIDE
        return bool(self._held)

    def _reason(self) -> tuple[str, bool]:
        """The reasoning that is certain, and whether it was closed."""
        end = self._held.find(self._close)
        if end >= 0:
            part = self._take(end).rstrip(_NEWLINES)
            self._held = self._held[len(self._close) :]
            self._place = _Place.BEFORE
            self._closed = True
            return part, True
        certain = self._held[: len(self._held) - self._half_tag()].rstrip(_NEWLINES)
        return self._take(len(certain)), False

    def _half_tag(self) -> int:
        """How many of the held characters at the end may begin the closing tag."""
        sizes = range(min(len(self._close) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._close.startswith(self._held[-size:])), 0)

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken
