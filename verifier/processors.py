"""What changes the target's logits before they become p: penalties, biases, and ends that come too early.

Names, meanings and order are vLLM's: tokens that may not end the text yet, logit_bias, repetition penalty, frequency
and presence penalty; then temperature and the filters of `verifier/sampling.py`. A drafted position sees the drafts
before it as it would see them committed, so drafts are verified against the very p that plain decoding would have.

Shapes: R rows, Q queries a row (the anchor, then drafted tokens), T queries that were run, E entries, S rows allocated,
V vocabulary.
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
        self,
        logits: Tensor,
        places: Tensor,
        positions: Tensor,
        counts: TokenCounts | None,
        first: int,
        drafted: Tensor,
        sees: Tensor,
    ) -> Tensor:
        """Changed logits [T, V], in float32 or better, of the queries that were run.

        Args:
            places: int64 [T], r * Q + q of each query (`Packing.index`).
            positions: int64 [T], where the token that each query predicts will stand.
            counts: of the allocated rows, these being `first ..`; needed where a row has a penalty.
            drafted: int64 [R, Q - 1], the tokens behind the anchor.
            sees: bool [R, Q, Q], which queries each query follows, itself included.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        rows_T = places // sees.shape[1]
        if self.ends is not None:
            rows, ids, first_allowed = self.ends
            early_ET = (rows_T == rows[:, None]) & (positions < first_allowed[:, None])
            entry, query = early_ET.nonzero(as_tuple=True)
            logits[query, ids[entry]] = -torch.inf
        if self.bias is not None:
            rows, ids, values = self.bias
            entry, query = (rows_T == rows[:, None]).nonzero(as_tuple=True)
            logits[query, ids[entry]] += values[entry]
        if self.penalties is not None:
            assert counts is not None
            repetition_T1, frequency_T1, presence_T1 = (column[rows_T, None] for column in self.penalties)
            count_TV = counts.answer[first + rows_T]
            before_TN = sees.flatten(0, 1)[places, 1:].to(count_TV.dtype)
            count_TV.scatter_add_(1, drafted[rows_T], before_TN)
            penalty = torch.where((count_TV > 0) | counts.prompt[first + rows_T], repetition_T1, 1.0)
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits -= frequency_T1 * count_TV + presence_T1 * (count_TV > 0)
        return logits


def has_penalty(params: SamplingParams) -> bool:
    """Whether a request's distribution depends on the tokens before."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
