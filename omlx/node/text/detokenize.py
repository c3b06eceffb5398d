"""Token ids to text, one at a time, never half a character."""

import codecs

from omlx.node.text.tokenizer import Tokenizer


class Detokenizer:
    """One answer's decoder. Each token costs the same, however long the answer is.

    The joined parts are what decoding all ids at once gives, special tokens left out. Bytes that are no
    UTF-8 become one replacement character per ill-formed run, as Unicode recommends; byte-fallback
    tokenizers, decoding at once, would also take well-formed neighbours of such bytes for ill-formed.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False) -> None:
        """`continues`: the answer goes on with the prompt's text, so a leading space belongs to it."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space and not continues

    def add(self, token_id: int) -> str:
        """The text that is complete now; a character still missing bytes waits."""
        if token_id in self._tokenizer.skipped:
            return ""
        return self._stripped(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """One replacement character if the last character stayed unfinished, else nothing."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
