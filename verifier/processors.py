"""What changes the target's logits before they become p: penalties, biases, and ends that come too early.

Names, meanings and order are vLLM's: tokens that may not end the text yet, logit_bias, repetition penalty, frequency
and presence penalty; then temperature and the filters of `verifier/sampling.py`. A drafted position sees the drafts
before it as it would see them committed, so drafts are verified against the very p that plain decoding would have.

Shapes: R rows, Q queries a row (the anchor, then drafted tokens), S rows allocated, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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

    repetition: Tensor | None  # [R] float32 each; None where no row has a penalty
    frequency: Tensor | None
    presence: Tensor | None
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows int64, ids int64, values float32, one entry a biased token
    min_tokens: Tensor | None  # [R] int64; None where no row has any
    ends: tuple[Tensor, Tensor] | None  # rows, ids: what may not come before
    prompt_lengths: Tensor  # [R] int64

    @classmethod
    def stack(
        cls,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        eos_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> "Processors | None":
        """Of R requests; None where none of them changes anything."""
        penalties, biased, early = any(map(has_penalty, params)), any(p.logit_bias for p in params), None
        if any(p.min_tokens for p in params):
            early = [p.min_tokens for p in params]
        if not penalties and not biased and early is None:
            return None

        def column(name: str) -> Tensor | None:
            return torch.tensor([getattr(p, name) for p in params], device=device) if penalties else None

        entries = [(row, *item) for row, p in enumerate(params) for item in (p.logit_bias or {}).items()]
        bias = tuple(torch.tensor(part, device=device) for part in zip(*entries, strict=True)) if entries else None
        stops = [
            (row, token)
            for row, p in enumerate(params)
            if p.min_tokens
            for token in {*(p.stop_token_ids or ()), *(() if p.ignore_eos else eos_ids)}
        ]
        ends = tuple(torch.tensor(part, device=device) for part in zip(*stops, strict=True)) if stops else None
        return cls(
            column("repetition_penalty"),
            column("frequency_penalty"),
            column("presence_penalty"),
            bias,  # type: ignore[arg-type]
            None if early is None else torch.tensor(early, device=device),
            ends,  # type: ignore[arg-type]
            torch.tensor(list(prompt_lengths), device=device),
        )

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
        if self.min_tokens is not None and self.ends is not None:
            rows, ids = self.ends
            early_RQ = positions - self.prompt_lengths[:, None] < self.min_tokens[:, None]
            logits[rows, :, ids] = logits[rows, :, ids].masked_fill(early_RQ[rows], -torch.inf)
        if self.bias is not None:
            rows, ids, values = self.bias
            logits[rows, :, ids] += values[:, None]
        if self.repetition is not None and self.frequency is not None and self.presence is not None:
            assert counts is not None
            span = slice(first, first + len(logits))
            queries = logits.shape[1]
            count_RQV = counts.answer[span, None].repeat(1, queries, 1)
            count_RQV.scatter_add_(2, drafted[:, None].expand(-1, queries, -1), sees[..., 1:].to(count_RQV.dtype))
            used_RQV = (count_RQV > 0) | counts.prompt[span, None]
            penalty = torch.where(used_RQV, self.repetition[:, None, None], 1.0)
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits -= self.frequency[:, None, None] * count_RQV + self.presence[:, None, None] * (count_RQV > 0)
        return logits


def has_penalty(params: SamplingParams) -> bool:
    """Whether a request's distribution depends on the tokens before."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
