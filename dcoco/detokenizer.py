"""Token ids to text, piece by piece: whole characters only, and cut before a stop string."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that don't make up a character yet
CONTEXT = 6  # tokens before the new ones that are decoded along: some tokenizers join neighbours (spaces, accents)


class Detokenizer:
    """The growing text of one request.

    `text` is all text that is settled; `push` returns what each new token adds to it. Held back are bytes of an
    unfinished character and, where stop strings are given, a tail that may be the beginning of one. A stop string that
    is complete within the first `min_tokens` tokens is text like any other, as in vLLM.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0):
        self.tokenizer = tokenizer
        self.stop = stop
        self.min_tokens = min_tokens
        self.text = ""
        self.stopped = False
        self._held = ""  # decoded, but maybe the start of a stop string
        self._ids: list[int] = []
        self._done = 0  # ids whose text has been taken
        self._ends = [0]  # values that _done has had: between these, characters are whole

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is settled by it ("" while a character or a stop string is open)."""
        self._ids.append(token_id)
        start = self._start()
        before = self._decode(self._ids[start : self._done])
        after = self._decode(self._ids[start:])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._done = len(self._ids)
        self._ends.append(self._done)
        return self._settle(after[len(before) :])

    def finish(self) -> str:
        """No more tokens: return what was held back, unfinished characters included."""
        start = self._start()
        rest = self._decode(self._ids[start:])[len(self._decode(self._ids[start : self._done])) :]
        piece = self._held + ("" if self.stopped else rest)
        self._held = ""
        self._done = len(self._ids)
        self.text += piece
        return piece

    def _start(self) -> int:
        """Where to decode from: some tokens back, but never inside a character."""
        while len(self._ends) > 1 and self._ends[1] <= self._done - CONTEXT:
            self._ends.pop(0)
        return self._ends[0] if self._ends[0] <= max(0, self._done - CONTEXT) else 0

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _settle(self, new: str) -> str:
        pending = self._held + new
        # What was held back holds no more than beginnings, but for stop strings that came too early.
        starts = [pending.find(stop, max(0, len(self._held) - len(stop) + 1)) for stop in self.stop]
        found = [index for index in starts if index >= 0]
        if found and len(self._ids) > self.min_tokens:
            self.stopped = True
            piece, self._held = pending[: min(found)], ""
        else:
            held = max((_overlap(pending, stop) for stop in self.stop), default=0)
            piece, self._held = pending[: len(pending) - held], pending[len(pending) - held :]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string could begin with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
