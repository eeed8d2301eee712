"""From logits to tokens: sampling parameters, the target's distribution p, and noise that needs no generator.

The noise is counter-based: every variate is a hash of (request seed, absolute position, stream, token id) and of
nothing else. So a request draws the same tokens alone and in any batch, whatever was drafted and however often a
position is evaluated, and a batch of requests needs neither generators nor a loop.

Shapes: R rows (requests), Q query positions a row, V vocabulary, K candidates a position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral, Real

import torch
from torch import Tensor

from verifier.errors import ParameterError

MAX_LOGPROBS = 20  # as in vLLM and OpenAI's API
GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM
_FLOAT32_MAX = 3.4028234e38
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class Stream(IntEnum):
    """Independent sources of noise at one (seed, position). Which step draws from which decides exactness."""

    TARGET = 0  # the token that plain sampling would emit; also a walk that races its own q, under match or one-hot
    ACCEPT = 1  # uniforms of the acceptance tests
    RESIDUAL = 2  # the token after a rejection, and the bonus token
    WALK = 3  # the draft of the sampled walk: must be independent of ACCEPT and RESIDUAL


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled; names and meanings are those of vLLM's `SamplingParams`.

    After construction `stop` and `stop_token_ids` are always tuples, and a `top_k` of -1 is 0. All but the fields from
    `min_tokens` to `logit_bias` are applied here; those are in `verifier/processors.py`. Raises `ParameterError`.
    """

    max_tokens: int = 256  # tokens to generate at most, >= 1
    temperature: float = 0.0  # 0 (and anything below 1e-5) is greedy
    top_p: float = 1.0  # keep the smallest set of tokens that reaches this mass; 1 = off
    top_k: int = 0  # keep the k most probable tokens; 0 or -1 = off
    min_p: float = 0.0  # drop tokens less probable than min_p times the most probable one; 0 = off
    seed: int | None = None  # any int64; None lets the decoder choose one
    stop: str | Sequence[str] | None = None  # generation ends before the first of these strings
    stop_token_ids: Sequence[int] | None = None  # generation ends at any of these tokens
    ignore_eos: bool = False  # go on past the end-of-sequence token
    min_tokens: int = 0  # no end (end-of-sequence token, stop, stop_token_ids) before so many tokens
    repetition_penalty: float = 1.0  # > 1 makes tokens of prompt and answer less likely; 1 = off
    presence_penalty: float = 0.0  # -2 to 2, taken off the logits of the answer's tokens
    frequency_penalty: float = 0.0  # -2 to 2, the same for each time that they occur
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens, -100 to 100
    logprobs: int | None = None  # log-probabilities of each token and so many best ones (0 to 20), before all this
    n: int = 1  # answers to the prompt, with the seeds seed, seed + 1, ...

    def __post_init__(self) -> None:
        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen

        store("max_tokens", _integer("max_tokens", self.max_tokens, 1, _INT64_MAX))
        store("temperature", _number("temperature", self.temperature, 0.0, _FLOAT32_MAX))
        store("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ParameterError("top_p=0.0: must be above 0 and at most 1; for greedy decoding set temperature=0")
        store("top_k", max(0, _integer("top_k", self.top_k, -1, _INT32_MAX)))
        store("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            store("seed", _integer("seed", self.seed, -_INT64_MAX - 1, _INT64_MAX))
        store("stop", _strings("stop", self.stop))
        store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        store("min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        store("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, _FLOAT32_MAX))
        if self.repetition_penalty == 0.0:
            raise ParameterError("repetition_penalty=0.0: must be above 0; 1 switches it off")
        store("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        store("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        store("logit_bias", _biases("logit_bias", self.logit_bias))
        if self.logprobs is not None:
            store("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        store("n", _integer("n", self.n, 1, _INT32_MAX))


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ParameterError(f"{name}={value!r}: must be an integer from {low} to {high}")
    return int(value)


def _number(name: str, value: object, low: float, high: float) -> float:
    # The comparison is false for NaN, so NaN is refused along with the infinities.
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:  # type: ignore[operator]
        raise ParameterError(f"{name}={value!r}: must be a finite number from {low:g} to {high:g}")
    return float(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ParameterError(f"{name}={value!r}: must be a non-empty string or a list of non-empty strings")
    return tuple(items)


def _biases(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name}={value!r}: must be a dictionary from token ids to numbers")
    return {
        _integer(f"{name} token", token, 0, _INT32_MAX): _number(f"{name}[{token}]", bias, -100.0, 100.0)
        for token, bias in value.items()
    }


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = () if value is None else value
    if not isinstance(items, list | tuple):
        raise ParameterError(f"{name}={value!r}: must be a list of token ids")
    return tuple(_integer(f"{name}[{i}]", item, 0, _INT32_MAX) for i, item in enumerate(items))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The sampling parameters of R rows as tensors on one device; greedy rows carry temperature 0 and no filter."""

    temperature: Tensor  # [R] float32, exactly 0 where greedy
    top_p: Tensor  # [R] float32, 1 = off
    top_k: Tensor  # [R] int64, 0 = off
    min_p: Tensor  # [R] float32, 0 = off
    seed: Tensor  # [R] int64
    all_greedy: bool  # these three let the hot path skip work without asking the device
    any_greedy: bool
    any_filter: bool

    @classmethod
    def stack(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """Stack R requests; `seeds[r]` (any int64) is row r's seed, with `params[r].seed` resolved by the caller."""
        greedy = [p.temperature < GREEDY_BELOW for p in params]

        def column(values: list[float], off: float) -> Tensor:
            return torch.tensor([off if g else v for g, v in zip(greedy, values, strict=True)], dtype=torch.float32)

        return cls._build(
            column([p.temperature for p in params], 0.0).to(device),
            column([p.top_p for p in params], 1.0).to(device),
            torch.tensor([0 if g else p.top_k for g, p in zip(greedy, params, strict=True)]).long().to(device),
            column([p.min_p for p in params], 0.0).to(device),
            torch.tensor(list(seeds), dtype=torch.int64, device=device),
        )

    def select(self, rows: Sequence[int] | Tensor) -> "SamplingBatch":
        """The batch of these rows, in this order. Waits for the device once: for when rows come and go."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.seed.device)
        columns = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed)
        return self._build(*(column[rows] for column in columns))

    def spread(self, rows: Tensor) -> "SamplingBatch":
        """One row for each of `rows` int64 [T], which name every row of this batch at least once."""
        return replace(
            self,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )

    @classmethod
    def _build(cls, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor) -> "SamplingBatch":
        greedy = temperature == 0
        filtered = (top_p < 1) | (top_k > 0) | (min_p > 0)
        flags = torch.stack([greedy.all(), greedy.any(), filtered.any()]).tolist()
        return cls(temperature, top_p, top_k, min_p, seed, *flags)


def probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that the rows are sampled from: p[R, Q, V] of logits[R, Q, V].

    float64 logits give float64, all others float32. Order as in vLLM: temperature, min-p, top-k, top-p, each on what
    the one before left over. Greedy rows get the exact one-hot of the argmax. Ties go to the lowest id, here and in
    every filter. Logits of -inf get probability 0; each position needs one finite logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if batch.all_greedy:
        return _one_hot_argmax(logits)
    temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature).to(logits.dtype)
    # Subtracting the maximum first keeps a tiny temperature from overflowing: the best logit stays exactly 0.
    z = (logits - logits.amax(-1, keepdim=True)).div_(temperature.view(-1, 1, 1))
    if batch.any_filter:
        z.masked_fill_(z < batch.min_p.to(z.dtype).log().view(-1, 1, 1), -math.inf)
        z.masked_fill_(~_top_k_top_p(z, batch), -math.inf)
    p = z.softmax(-1)
    if batch.any_greedy:
        p = torch.where((batch.temperature == 0).view(-1, 1, 1), _one_hot_argmax(logits), p)
    return p


def _one_hot_argmax(logits: Tensor) -> Tensor:
    # max(-1) also takes the first of several best, in a quarter of argmax's time.
    return torch.zeros_like(logits).scatter_(-1, logits.max(-1, keepdim=True).indices, 1.0)


def _top_k_top_p(z: Tensor, batch: SamplingBatch) -> Tensor:
    """Which of z[R, Q, V] (maximum 0) survive top-k and then top-p: bool[R, Q, V].

    Both keep the first `count` tokens of the descending order, so the count and the value of the last one kept are all
    that is needed. They nearly always lie in a short head of the order; sorting a whole vocabulary costs more than the
    target's forward pass of a small model (49152 tokens x 8 positions, one core: 30 ms, the 256 largest 1.3 ms).
    The result of a row doesn't depend on how long a head the others needed.
    """
    vocab = z.shape[-1]
    top_k = batch.top_k.view(-1, 1, 1)
    top_p = batch.top_p.to(z.dtype).view(-1, 1, 1)
    k = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))  # [R, 1, 1]
    everything = (k == vocab) & (top_p >= 1)
    full_mass = z.softmax(-1).amax(-1, keepdim=True).reciprocal()  # sum of exp(z), as exp(max z) = 1
    for width in (256, 4096, vocab):
        head = z.topk(min(width, vocab)).values  # [R, Q, W], descending
        rank = torch.arange(head.shape[-1], device=z.device)
        mass = torch.where(rank < k, head.exp(), 0.0).cumsum(-1)
        wanted = top_p * torch.where(k == vocab, full_mass, mass[..., -1:])
        in_head = (k <= width) | everything | ((k == vocab) & (mass[..., -1:] >= wanted))
        if width >= vocab or bool(in_head.all()):
            break
    nucleus = torch.where(top_p < 1, (mass < wanted).sum(-1, keepdim=True) + 1, vocab)
    count = torch.minimum(nucleus, k).clamp(max=head.shape[-1])  # [R, Q, 1]
    last = head.gather(-1, count - 1).masked_fill(everything, -math.inf)
    ties = z == last
    room = count - (head > last).sum(-1, keepdim=True)  # how many of the tied last ones fit: those of the lowest ids
    return (z > last) | (ties & ((ties.cumsum(-1) <= room) | everything))


def draw(p: Tensor, batch: SamplingBatch, positions: Tensor, stream: Stream = Stream.TARGET) -> Tensor:
    """One token for every position: y[R, Q] int64, drawn from p[R, Q, V] by a race of exponential clocks.

    Token v's clock rings at E_v / p_v with E_v ~ Exp(1); the first to ring is v with probability p_v (this is the
    Gumbel-max trick). p needs no normalisation, and a token with p = 0 never wins. A drafter that races its own q with
    the same noise is likely to have the same winner: it's coupled to the target.

    positions[R, Q] int64 are the absolute positions of the tokens drawn.
    """
    if batch.all_greedy:
        return p.max(-1).indices
    noise = exponential_noise(batch.seed, positions, stream, torch.arange(p.shape[-1], device=p.device))
    return torch.div(p, noise, out=noise).max(-1).indices  # greedy rows need no care: their p is one-hot


def best_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
    """Log-probabilities of tokens [R, Q] and of the `count` most probable ones, by logits [R, Q, V] as they are.

    Returns ids and values, nested lists [R][Q][count + 1]; the token itself comes first, and again among the best where
    it is one of them. Waits for the device.
    """
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = log_probs.topk(count)
    ids = torch.cat([tokens[..., None], best.indices], dim=-1)
    values = torch.cat([log_probs.gather(-1, tokens[..., None]), best.values], dim=-1)
    return ids.tolist(), values.tolist()


_GOLDEN64 = 0x9E3779B97F4A7C15 - 2**64  # constants of splitmix64 and murmur3, as the signed integers that torch has
_MIX64_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX64_B = 0x94D049BB133111EB - 2**64
_GOLDEN32 = 0x9E3779B9 - 2**32
_MIX32_A = 0x85EBCA6B - 2**32
_MIX32_B = 0xC2B2AE35 - 2**32
_UNIT31 = 2.0**-31 * (1 - 2.0**-24)  # a shade below 2^-31, so that 2^31 (float32 rounds up to it) times this is < 1


def exponential_noise(seed: Tensor, position: Tensor, stream: int, ids: Tensor) -> Tensor:
    """Exp(1) variates E[R, Q, V or K] float32, in [2^-32, 16.7], of seed[R] and position[R, Q] (int64).

    ids int64 is [V], the same for all positions, or [R, Q, K]. A variate depends on (seed, position, stream, id) only:
    a token has the same one in a candidate list as in the whole vocabulary.
    """
    # The 64-bit key of a position is cheap. Per token only 32-bit operations follow, in place: murmur3's finaliser with
    # one half of the key before and the other in the middle, as a single xor would only permute the ids' values.
    key = _key(seed, position, stream).unsqueeze(-1).view(torch.int32)  # [R, Q, 2]
    h = (ids.to(torch.int32) * _GOLDEN32) ^ key[..., :1]
    _xor_shift32_(h, 16).mul_(_MIX32_A).bitwise_xor_(key[..., 1:])
    _xor_shift32_(h, 13).mul_(_MIX32_B)
    _xor_shift32_(h, 16).bitwise_and_(0x7FFFFFFF)
    return _exponential(h)


def _exponential(h: Tensor) -> Tensor:
    """E = -log1p(-v) with v = (h + 0.5) / 2^31 for h in [0, 2^31), int32.

    The variates that win races are small: this way they keep their digits. E is never 0, which would win every race,
    and never inf, with which the only possible token would tie with the impossible ones.
    """
    return h.to(torch.float32).add_(0.5).mul_(-_UNIT31).log1p_().neg_()


def uniform_noise(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Uniform variates [R, Q] in [0, 1), float64 with 53 random bits, of seed[R] and position[R, Q] (int64)."""
    return _shift_right64(_key(seed, position, stream), 11).to(torch.float64).mul_(2.0**-53)


def _key(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """64 random bits [R, Q] int64 for (seed[R], position[R, Q], stream)."""
    row = _splitmix64(_splitmix64(seed) + int(stream))
    return _splitmix64(row.unsqueeze(-1) + position * _GOLDEN64)


def _splitmix64(x: Tensor) -> Tensor:
    """One step of splitmix64 (Steele, Lea, Flood 2014) on int64, which wraps around as the algorithm wants."""
    x = x + _GOLDEN64
    x = (x ^ _shift_right64(x, 30)) * _MIX64_A
    x = (x ^ _shift_right64(x, 27)) * _MIX64_B
    return x ^ _shift_right64(x, 31)


def _shift_right64(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # >> copies the sign bit: mask the copies


def _xor_shift32_(h: Tensor, bits: int) -> Tensor:
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))
