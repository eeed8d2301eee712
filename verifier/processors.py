"""What changes the target's logits before they become p: penalties, biases, and ends that come too early.

Names, meanings and order are vLLM's: tokens that may not end the text yet, logit_bias, repetition penalty, frequency
and presence penalty; then temperature and the filters of `verifier/sampling.py`. A drafted position sees the drafts
before it as it would see them committed, so drafts are verified against the very p that plain decoding would have.

Shapes: R rows, Q queries a row (the anchor, then drafted tokens), S rows allocated, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifier.sampling import SamplingParams


class TokenCounts:
    """Which tokens each row's prompt holds and how often its answer does, for penalties."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        self.prompt = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)  # [S, V]
        self.answer = torch.zeros(rows, vocabulary, device=device)  # [S, V] float32

    def start(self, row: int, prompt_ids: Sequence[int]) -> None:
        """A request takes over a row."""
        self.prompt[row] = False
        self.prompt[row, torch.tensor(prompt_ids, device=self.prompt.device)] = True
        self.answer[row] = 0.0

    def add(self, first: int, tokens: Tensor, counts: Tensor) -> None:
        """Rows `first ..` have committed the first counts[R] of tokens[R, n]."""
        taken = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self.answer[first : first + len(tokens)].scatter_add_(1, tokens, taken.to(self.answer.dtype))

    def move(self, source: int, target: int) -> None:
        """Make row `target` a copy of row `source`."""
        self.prompt[target], self.answer[target] = self.prompt[source], self.answer[source]


@dataclass(frozen=True, slots=True, eq=False)
class Processors:
    """The changes that R rows ask for, as tensors on one device."""

    penalties: tuple[Tensor, Tensor, Tensor] | None  # repetition, frequency, presence: [R] float32 each
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows int64, ids int64, values float32, one entry a biased token
    ends: tuple[Tensor, Tensor, Tensor] | None  # rows, ids, and the first position where each may stand: int64

    @classmethod
    def stack(
        cls,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        eos_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> "Processors | None":
        """Of R requests; None where none of them changes anything."""

        def columns(entries: Sequence[tuple[float, ...]]) -> Any:
            return tuple(torch.tensor(part, device=device) for part in zip(*entries, strict=True)) if entries else None

        penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        bias = [(row, *item) for row, p in enumerate(params) for item in (p.logit_bias or {}).items()]
        ends = [
            (row, token, length + p.min_tokens)
            for row, (p, length) in enumerate(zip(params, prompt_lengths, strict=True))
            if p.min_tokens
            for token in {*(p.stop_token_ids or ()), *(() if p.ignore_eos else eos_ids)}
        ]
        penalised = any(map(has_penalty, params))
        if not penalised and not bias and not ends:
            return None
        return cls(columns(penalties) if penalised else None, columns(bias), columns(ends))

    def apply(
        self, logits: Tensor, positions: Tensor, counts: TokenCounts | None, first: int, drafted: Tensor, sees: Tensor
    ) -> Tensor:
        """Changed logits [R, Q, V], in float32 or better.

        Args:
            positions: int64 [R, Q], where the token that each query predicts will stand.
            counts: of the allocated rows, these being `first ..`; needed where a row has a penalty.
            drafted: int64 [R, Q - 1], the tokens behind the anchor.
            sees: bool [R, Q, Q], which queries each query follows, itself included.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if self.ends is not None:
            rows, ids, first_allowed = self.ends
            early = positions[rows] < first_allowed[:, None]
            logits[rows, :, ids] = logits[rows, :, ids].masked_fill(early, -torch.inf)
        if self.bias is not None:
            rows, ids, values = self.bias
            logits[rows, :, ids] += values[:, None]
        if self.penalties is not None:
            assert counts is not None
            repetition_R, frequency_R, presence_R = self.penalties
            span = slice(first, first + len(logits))
            queries = logits.shape[1]
            count_RQV = counts.answer[span, None].repeat(1, queries, 1)
            count_RQV.scatter_add_(2, drafted[:, None].expand(-1, queries, -1), sees[..., 1:].to(count_RQV.dtype))
            used_RQV = (count_RQV > 0) | counts.prompt[span, None]
            penalty = torch.where(used_RQV, repetition_R[:, None, None], 1.0)
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits -= frequency_R[:, None, None] * count_RQV + presence_R[:, None, None] * (count_RQV > 0)
        return logits


def has_penalty(params: SamplingParams) -> bool:
    """Whether a request's distribution depends on the tokens before."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
