"""What a request gives back: text, tokens, why it ended, and how well drafting went."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from torch import Tensor

PHASES = ("draft", "correct", "verify")
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class Stats:
    """Acceptance and speed of one request; the one definition that decoder, experiments and README share.

    A round is one verification, of a draft or of none. The token that the prefill yields belongs to no round, and what
    a round would have committed behind the end of the text is not counted.
    """

    rounds: int = 0
    drafts: int = 0  # rounds in which any drafted token was verified
    draft_tokens: int = 0  # tokens drafted and submitted to verification
    accepted_tokens: int = 0  # of these, accepted and part of the output
    committed_tokens: int = 0  # tokens that rounds added to the output: accepted ones, corrections and bonus tokens
    accepted_at: list[int] = field(default_factory=list)  # [t]: rounds that accepted more than t draft tokens
    seconds: float = 0.0  # from admission (prefill included) to the last token
    prefill_seconds: float = 0.0  # of these, until the first token
    # Of the rounds that this request took part in, by phase (draft, correct, verify), shared with the rows beside it.
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed by rounds / rounds; 1 is plain decoding. 0 where no round ran."""
        return self.committed_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Rounds whose draft was accepted up to t tokens beyond the anchor / all rounds, for t = 1, 2, ... as far as
        drafts could reach; never increasing."""
        return [count / self.rounds for count in self.accepted_at]

    @property
    def tokens_per_second(self) -> float:
        """All new tokens (the prefill's included) over `seconds`."""
        return (self.committed_tokens + 1) / self.seconds if self.seconds else 0.0

    @classmethod
    def total(cls, each: Iterable["Stats"]) -> "Stats":
        """The sums of several requests; the times of those that ran side by side overlap."""
        together = cls()
        for stats in each:
            together.add(stats)
        return together

    def add(self, other: "Stats") -> None:
        """Count another request as well."""
        self.rounds += other.rounds
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.committed_tokens += other.committed_tokens
        self.accepted_at = [a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]
        self.seconds += other.seconds
        self.prefill_seconds += other.prefill_seconds
        for phase, seconds in other.phase_seconds.items():
            self.phase_seconds[phase] += seconds

    def count(self, drafted: int, depth: int, accepted: int, committed: int, phase_seconds: dict[str, float]) -> None:
        """Add one round, whose draft of `drafted` tokens reached `depth` tokens beyond the anchor."""
        for phase, seconds in phase_seconds.items():
            self.phase_seconds[phase] += seconds
        self.rounds += 1
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.committed_tokens += committed
        self.accepted_at.extend([0] * (depth - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1


@dataclass
class RoundTrace:
    """One round of one request, kept on demand: what was drafted from, and what came of it."""

    start: int  # index in `token_ids` of the first token that the round committed
    committed: int  # tokens committed: accepted drafts, then the correction or bonus token unless the text ended before
    accepted: int  # draft tokens accepted
    candidates: Tensor | None  # [n, K] int64, the lattice; None in a round without a draft


@dataclass
class RequestOutput:
    """The finished answer to one prompt. `token_ids` ends with the end-of-sequence token where one was produced."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats
    trace: list[RoundTrace] | None = None
    # Where `SamplingParams.logprobs` asks, for each token {id: log-probability}: the token itself, then the best ones.
    logprobs: list[dict[int, float]] | None = None
    others: list["RequestOutput"] = field(default_factory=list)  # the further answers where `SamplingParams.n` > 1

    @property
    def outputs(self) -> list["RequestOutput"]:
        """All answers to the prompt: this one, then those with the seeds seed + 1, ..."""
        return [self, *self.others]


@dataclass
class Chunk:
    """A piece of a stream: the text that is now settled, and the tokens since the last piece."""

    text: str
    token_ids: list[int]
    output: RequestOutput | None = None  # set in the last chunk
    logprobs: list[dict[int, float]] | None = None  # of `token_ids`, as in RequestOutput
