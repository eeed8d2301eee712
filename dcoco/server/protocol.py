"""What may be asked: the bodies of /v1/completions and /v1/chat/completions, and the sampling parameters in them.

Names are OpenAI's, and vLLM's where OpenAI has none. A field that isn't served is an error that names it: an answer
that silently ignores what was asked for is worse. One whose value asks for nothing, as null does, is let through.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dcoco.errors import ParameterError
from dcoco.server.errors import ApiError
from verifier.sampling import MAX_LOGPROBS, SamplingParams

COMPLETION_TOKENS = 16  # the default of max_tokens there; a chat's is all the room that is left
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000  # characters
MAX_TOKEN_LIST = 1000  # tokens in logit_bias and in stop_token_ids

# Accepted and left aside: they change nothing in an answer.
HARMLESS = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
# Not served, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "tool_call_id": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "annotations": ([],),
    "refusal": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


class Body(BaseModel):
    """An object of a call: unknown fields are refused, and so are values of another type (400 and 422)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name in NOT_SERVED:
                if value is not None and value not in NOT_SERVED[name]:
                    raise PydanticCustomError("not_served", "{name} is not served: leave it out", {"name": name})
            elif name not in HARMLESS:
                kept[name] = value  # pydantic refuses it
        return kept


class StreamOptions(Body):
    """What a stream holds besides the answer."""

    include_usage: bool = False


class Message(Body):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] = ""
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates take it. Raises ApiError for a role or content that isn't served."""
        role = "system" if self.role == "developer" else self.role
        if role not in ("system", "user", "assistant"):
            raise ApiError(400, f"role {self.role!r} is not served: use system, user or assistant", "messages")
        message = {"role": role, "content": self._text()}
        return message if self.name is None else {**message, "name": self.name}

    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"content of type {part.get('type')!r} is not served: send text", "messages")
        return "\n".join(part["text"] for part in self.content)


class GenerationBody(Body):
    """What both kinds of calls have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_TOKEN_LIST)] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_TOKEN_LIST)] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def best_logprobs(self) -> int | None:
        """How many best tokens' log-probabilities are wanted; None: no log-probabilities at all."""
        raise NotImplementedError

    def default_tokens(self, room: int) -> int:
        """max_tokens where none is given."""
        raise NotImplementedError

    def sampling(self, room: int) -> SamplingParams:
        """The sampling parameters, for a model with room for so many tokens. Raises ParameterError or ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if any(
            len(stop) > MAX_STOP_LENGTH for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ())
        ):
            raise ApiError(400, f"a stop string may have {MAX_STOP_LENGTH} characters", "stop")
        max_tokens = self.max_tokens
        return SamplingParams(
            max_tokens=self.default_tokens(room) if max_tokens is None else max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            n=self.n,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._biases(),
            logprobs=self.best_logprobs,
        )

    def _biases(self) -> dict[int, float] | None:
        if wrong := [token for token in self.logit_bias or () if not token.isascii() or not token.isdecimal()]:
            raise ApiError(400, f"logit_bias names {wrong[0]!r}, which is not a token id", "logit_bias")
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    @property
    def best_logprobs(self) -> int | None:
        return self.logprobs

    def default_tokens(self, room: int) -> int:
        return max(COMPLETION_TOKENS, self.min_tokens)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, of which there may be several. Raises ParameterError where there is none."""
        prompts = self.prompt
        if isinstance(prompts, str):
            return [prompts]
        if not prompts:
            raise ParameterError("prompt=[]: must be a text, token ids, or a list of these")
        return [prompts] if isinstance(prompts[0], int) else prompts


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def best_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                message = f"top_logprobs={self.top_logprobs}: must be an integer from 0 to {MAX_LOGPROBS}"
                raise ApiError(400, message, "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def default_tokens(self, room: int) -> int:
        return room
