"""From what was asked to token ids, away from the event loop: long texts take time."""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcoco.decoder import DCOCODecoder
from dcoco.server.errors import ApiError
from dcoco.server.protocol import ChatBody, CompletionBody, GenerationBody


class Prompts:
    """Encodes the prompts of calls, one call after the other in one thread: tokenizers are not made for several.

    A text with more characters than `max_model_len` of the longest tokens is refused before it is encoded.
    """

    def __init__(self, decoder: DCOCODecoder, max_model_len: int):
        self.decoder = decoder
        self.tokenizer = decoder.tokenizer
        self.max_model_len = max_model_len
        # Names of tokens are at least as long as their texts: byte-level ones have a character for each byte.
        self.max_characters = max_model_len * max(map(len, self.tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, body: GenerationBody) -> list[list[int]]:
        """Token ids of each prompt. Raises ParameterError or ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, body)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, body: GenerationBody) -> list[list[int]]:
        if isinstance(body, ChatBody):
            return self._chat(body)
        assert isinstance(body, CompletionBody)
        return self._completion(body)

    def _completion(self, body: CompletionBody) -> list[list[int]]:
        prompts = body.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check(prompt, "prompt")
        return [self.decoder.encode(prompt) for prompt in prompts]

    def _chat(self, body: ChatBody) -> list[list[int]]:
        if not body.messages:
            raise ApiError(400, "messages=[]: must have at least one message", "messages")
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template: use /v1/completions", "messages")
        messages = [message.for_template() for message in body.messages]
        self._check("".join(message["content"] for message in messages), "messages")
        extra = body.chat_template_kwargs or {}
        if reserved := extra.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise ApiError(400, f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **extra
            )
        except Exception as error:  # the template is a program, and it runs on what was sent
            raise ApiError(400, f"the chat template can't take these messages: {error}", "messages") from error
        return [encoded["input_ids"]]

    def _check(self, text: str, name: str) -> None:
        if len(text) > self.max_characters:
            message = (
                f"{len(text)} characters are more than the {self.max_model_len} tokens that prompt and answer may have "
                "together: shorten it"
            )
            raise ApiError(400, message, name)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"the text has half of a surrogate pair at character {error.start}", name) from error
