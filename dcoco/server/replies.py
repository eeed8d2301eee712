"""The answers as OpenAI's clients read them: whole, or in pieces as server-sent events."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dcoco.detokenizer import REPLACEMENT
from dcoco.loop import Answers
from dcoco.output import Chunk, RequestOutput, Stats
from dcoco.server.errors import as_api_error, to_json
from dcoco.server.metrics import speculation

TokenLogprobs = dict[int, float]  # of one token: itself, then the best ones


class Reply:
    """One call's answers; subclasses say how a choice looks."""

    prefix = ""
    whole_object = ""
    piece_object = ""

    def __init__(self, tokenizer: Any, model: str, best_logprobs: int | None):
        self.tokenizer = tokenizer
        self.model = model
        self.best_logprobs = best_logprobs
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def whole(self, answers: Answers, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """All of it, once it is there. Raises the error of a request that fails."""
        outputs = {index: chunk.output async for index, chunk in answers if chunk.output is not None}
        choices = [self.choice(index, outputs[index]) for index in sorted(outputs)]
        return self._envelope(self.whole_object, choices) | {"usage": usage(prompts, list(outputs.values()))}

    async def events(
        self, answers: Answers, prompts: Sequence[list[int]], include_usage: bool
    ) -> AsyncGenerator[bytes]:
        """Pieces as they come; an error ends them, as the status can't be changed any more."""
        outputs = []
        more = {"usage": None} if include_usage else {}
        try:
            async for index, chunk in answers:
                if chunk.output is not None:
                    outputs.append(chunk.output)
                elif not chunk.text and not (chunk.logprobs and chunk.token_ids):
                    continue  # nothing to show yet: half a character, or what may be the start of a stop string
                yield event(self._envelope(self.piece_object, [self.piece(index, chunk)]) | more)
        except Exception as error:
            yield event(as_api_error(error).body)
            return
        if include_usage:
            yield event(self._envelope(self.piece_object, []) | {"usage": usage(prompts, outputs)})
        yield b"data: [DONE]\n\n"

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """One whole answer."""
        raise NotImplementedError

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """A piece of one answer."""
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


class CompletionReply(Reply):
    """/v1/completions."""

    prefix = "cmpl"
    whole_object = piece_object = "text_completion"

    def __init__(self, tokenizer: Any, model: str, best_logprobs: int | None):
        super().__init__(tokenizer, model, best_logprobs)
        self._offsets: dict[int, int] = {}  # by answer: characters of the tokens so far

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._logprobs(index, output.token_ids, output.logprobs)
        return {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        reason = None if chunk.output is None else chunk.output.finish_reason
        logprobs = self._logprobs(index, chunk.token_ids, chunk.logprobs)
        return {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(
        self, index: int, tokens: list[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        texts = [self._text(token) for token in tokens]
        offsets, offset = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        best: list[dict[str, float]] = []
        for found in logprobs:
            best.append({})
            for token, value in found.items():
                best[-1].setdefault(self._text(token), value)  # pieces of characters may look alike: keep the better
        chosen = [found[token] for token, found in zip(tokens, logprobs, strict=True)]
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Any, model: str, best_logprobs: int | None):
        super().__init__(tokenizer, model, best_logprobs)
        self._begun: set[int] = set()  # answers whose first piece is out

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text}
        logprobs = self._logprobs(output.token_ids, output.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        delta = {"content": chunk.text}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant"} | delta
        reason = None if chunk.output is None else chunk.output.finish_reason
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[int], logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = []
        for token, found in zip(tokens, logprobs, strict=True):
            best = sorted(found, key=found.__getitem__, reverse=True)[: self.best_logprobs]
            tops = [self._entry(other, found[other]) for other in best]
            content.append(self._entry(token, found[token]) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": None if REPLACEMENT in text else list(text.encode())}


def usage(prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a call and, beyond OpenAI's fields, how well drafting went. A prompt with n answers counts once."""
    asked = sum(len(ids) for ids in prompts)
    answered = sum(len(output.token_ids) for output in outputs)
    together = Stats.total(output.stats for output in outputs)
    return {
        "prompt_tokens": asked,
        "completion_tokens": answered,
        "total_tokens": asked + answered,
        "speculation": speculation(together),
    }


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"
