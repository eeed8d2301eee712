"""The candidate selector of DFlash 2, a rival of the corrector: one bilinear score of two neighbouring tokens.

    S[t+1](j | i) = u[t+1, j] + <A[i] * P h[t+1], B[j]>

A and B are codebooks of the draft vocabulary: what a token lets follow, and what it follows. P h[t+1], the projected
hidden state of the later slot, says which of that counts here. In slot 1 the anchor is i. Tokens outside the draft
vocabulary score 0, in either place. B starts at zero: an untrained selector is exactly the plain drafter.

As published (DFlash 2, z-lab; vLLM's pull request 52816 and SGLang's 35371 state it): rank 256, the best 16
candidates, B from zero. There the codebooks cover the target's whole vocabulary; here that of the drafter, which
proposes nothing else. The convolutions that DFlash 2 adds to its drafter are no part of the selector.

Shapes: R rows, n slots, m = n + 1, K candidates, H hidden size, V vocabulary, W draft vocabulary, E rank.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcoco.corrector import Scores, with_anchor
from dcoco.recall import Recalled
from drafters.base import Lattice
from drafters.block import draft_vocabulary


@dataclass(frozen=True)
class SelectorConfig:
    """Sizes of a selector: the hidden size and the draft vocabulary of its drafter, and the rank of the codebooks."""

    hidden_size: int
    draft_vocab_size: int
    rank: int = 256


class Selector(nn.Module):
    """Scores neighbouring candidates of a lattice; `draft_ids` int64 [W] are set by whoever trains it.

    2 x W x E + E x H parameters: 4.3 M for SmolLM2 with 8192 draft tokens.
    """

    settings: ClassVar = SelectorConfig
    recalls: ClassVar = False

    def __init__(self, config: SelectorConfig):
        super().__init__()
        self.config = config
        words, rank = config.draft_vocab_size, config.rank
        self.before = nn.Embedding(words + 1, rank, padding_idx=words)  # A; the last row stands for all other tokens
        self.after = nn.Embedding(words + 1, rank, padding_idx=words)  # B
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)  # P
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", torch.arange(words))
        nn.init.normal_(self.before.weight, std=0.02)
        nn.init.zeros_(self.before.weight[words])
        nn.init.zeros_(self.after.weight)

    def forward(self, lattice: Lattice, table: Tensor, recalled: Recalled | None = None) -> Scores:
        """Score all pairs of a lattice; `table` [V, 2 E] is that of `token_table`. What is recalled has no say."""
        before_RmKE, after_RmKE = F.embedding(with_anchor(lattice), table).chunk(2, dim=-1)
        context_RnKE = before_RmKE[:, :-1] * self.hidden_projection(lattice.hidden)[:, :, None]
        pairs_RnKK = context_RnKE @ after_RmKE[:, 1:].transpose(-1, -2)
        scores_RnKK = lattice.log_probs[:, :, None] + pairs_RnKK.float()
        return Scores(scores_RnKK[:, 0, 0], scores_RnKK[:, 1:])

    def token_table(self, embedding: Tensor) -> Tensor:
        """Both codebooks [V, 2 E], laid out by the ids of the whole vocabulary; of the target's embedding [V, H] only
        its length counts. Raises DrafterError where `draft_ids` are no ids of it."""
        ids = draft_vocabulary(self.draft_ids, len(embedding))
        rows = torch.full((len(embedding),), len(ids), device=ids.device)
        rows[ids] = torch.arange(len(ids), device=ids.device)
        return torch.cat([self.before(rows), self.after(rows)], dim=-1)
