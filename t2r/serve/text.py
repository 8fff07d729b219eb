"""Tokens of an answer to text, piece by piece: characters are never broken, and stop strings never shown."""

from collections.abc import Sequence

from t2r.data.tokenizer import Tokenizer
from t2r.decode.text import TextStream


class AnswerText:
    """The text of one answer. What may be the beginning of a stop string is held back until that is decided."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_tokens: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
        prefix: Sequence[int] = (),
    ):
        self._stream = TextStream(tokenizer, stop_tokens, self._receive, prefix)
        self._stops, self._held, self._ready = stop_strings, "", []
        self.stopped = False  # a stop string has come; nothing more follows

    def add(self, tokens: Sequence[int]) -> str:
        """The new text that can be shown after these tokens."""
        self._stream([tokens])
        return self._take()

    def close(self) -> str:
        """The rest of the text, after the last token."""
        self._stream.close()
        if not self.stopped:
            self._ready.append(self._held)
        return self._take()

    def _receive(self, text: str) -> None:
        if self.stopped or not text:
            return
        text = self._held + text
        first = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        if first is not None:
            self.stopped, shown = True, first
        else:
            shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._ready.append(text[:shown])
        self._held = text[shown:]

    def _take(self) -> str:
        text = "".join(self._ready)
        self._ready.clear()
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may begin the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
