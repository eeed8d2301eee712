"""The lattice scorer of LiLiCorr, a rival of the corrector: a transformer in which all candidates see each other.

Every candidate of every slot is a node. Two layers of attention over the whole lattice give each node a vector of what
it lets follow (out) and one of what it follows (in); neighbours fit as far as these agree:

    S[t+1](j | i) = u[t+1, j] + g cos(out[t, i], in[t+1, j])

The anchor is no node: it gives the out vector of slot 0 and enters all others. `g` is learned and starts at zero: an
untrained scorer is exactly the plain drafter.

After "LiLiCorr: Lightweight Likelihood Correlation of Parallel Drafts" (2026, arXiv 2608.20530) and SGLang's pull
request 37462: nodes, features, layers and vectors are theirs. There g is fixed and the drafter's log-probability is a
feature only; here it is also the start, as for every other corrector, so that all learn the same on the same data. The
anchor's state is the drafter's input at the anchor (theirs: the target's features before it). Inputs are normalised:
embeddings would hardly be seen beside hidden states otherwise.

Shapes: R rows, n slots, K candidates, N = n K nodes, H hidden size, D width, h heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcoco.corrector import Scores
from dcoco.errors import DrafterError
from dcoco.recall import Recalled
from drafters.base import Lattice

GAIN = 32.0  # the unit of g: Adam moves a weight by the learning rate a step, and g must come to about 10
EPSILON = 1e-4  # of the length of a vector, below which it has no direction


@dataclass(frozen=True)
class LiLiCorrConfig:
    """Sizes of a lattice scorer; `block_size` and `candidates` are the most that its drafter drafts."""

    hidden_size: int
    block_size: int
    candidates: int
    width: int = 128
    layers: int = 2
    heads: int = 4


class LiLiCorr(nn.Module):
    """Scores neighbouring candidates of a lattice of up to `block_size` slots and `candidates` a slot."""

    settings: ClassVar = LiLiCorrConfig
    recalls: ClassVar = False

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        if config.width % config.heads:
            raise DrafterError(f"width={config.width} must be a multiple of heads={config.heads}")
        self.config = config
        hidden, width = config.hidden_size, config.width
        self.token = nn.Linear(hidden, width)
        self.slot = nn.Linear(hidden, width)
        self.features = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, width), nn.SiLU(), nn.Linear(width, width))
        self.slot_place = nn.Parameter(torch.zeros(config.block_size, 1, width))
        self.rank_place = nn.Parameter(torch.zeros(config.candidates, width))
        self.apart = nn.Embedding(2 * config.block_size - 1, config.heads)  # attention's bias, by slots between nodes
        self.layers = nn.ModuleList(_Layer(width, config.heads) for _ in range(config.layers))
        self.anchor = nn.Linear(hidden, width)
        self.join = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, width)
        self.into = nn.Linear(width, width)
        self.anchor_out = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.apart.weight)

    def forward(self, lattice: Lattice, table: Tensor, recalled: Recalled | None = None) -> Scores:
        """Score all pairs of a lattice; `table` [V, D] is that of `token_table`. What is recalled has no say."""
        nodes_RnKD, anchor_RD = self.represent(lattice, table)
        mixed_RnKD = anchor_RD[:, None, None]
        joined_RnKD = torch.cat([nodes_RnKD, mixed_RnKD.expand_as(nodes_RnKD), nodes_RnKD * mixed_RnKD], dim=-1)
        joined_RnKD = F.silu(self.join(joined_RnKD))
        out_RnKD, into_RnKD = _unit(self.out(joined_RnKD)), _unit(self.into(joined_RnKD))
        gain = GAIN * self.gain.float()
        first_RK = (into_RnKD[:, 0] @ _unit(self.anchor_out(anchor_RD))[..., None]).squeeze(-1)
        rest_RnKK = out_RnKD[:, :-1] @ into_RnKD[:, 1:].transpose(-1, -2)
        return Scores(
            lattice.log_probs[:, 0] + gain * first_RK.float(),
            lattice.log_probs[:, 1:, None] + gain * rest_RnKK.float(),
        )

    def token_table(self, embedding: Tensor) -> Tensor:
        """Projections [.., D] of token embeddings [.., H]: of the whole vocabulary once, before decoding."""
        return self.token(_norm(embedding))

    def represent(self, lattice: Lattice, table: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes [R, n, K, D] that have seen each other, and the anchor's state [R, D].

        Raises DrafterError for a larger lattice than it was made for.
        """
        slots, candidates = lattice.ids.shape[1:]
        if slots > self.config.block_size or candidates > self.config.candidates:
            raise DrafterError(
                f"a lattice of {slots} slots and {candidates} candidates is too large for a scorer of "
                f"{self.config.block_size} and {self.config.candidates}: take it to the drafter that it was trained for"
            )
        log_probs, device = lattice.log_probs, lattice.ids.device
        rank = torch.arange(candidates, device=device)
        features = [log_probs, log_probs.exp(), log_probs - log_probs[..., :1]]
        features += [(rank / max(1, candidates - 1)).expand_as(log_probs), (rank == 0).float().expand_as(log_probs)]
        nodes_RnKD = F.embedding(lattice.ids, table) + self.slot(_norm(lattice.hidden))[:, :, None]
        nodes_RnKD = nodes_RnKD + self.features(torch.stack(features, dim=-1).to(lattice.hidden.dtype))
        nodes_RnKD = nodes_RnKD + self.slot_place[:slots] + self.rank_place[:candidates]
        slot_N = torch.arange(slots, device=device).repeat_interleave(candidates)
        bias_hNN = self.apart(slot_N[:, None] - slot_N + self.config.block_size - 1).permute(2, 0, 1)
        nodes_RND = nodes_RnKD.flatten(1, 2)
        for layer in self.layers:
            nodes_RND = layer(nodes_RND, bias_hNN)
        return _norm(nodes_RND).view(nodes_RnKD.shape), _norm(self.anchor(_norm(lattice.anchor_hidden)))


class _Layer(nn.Module):
    """One layer of a transformer, normalised before each part; `bias` [h, N, N] is added to attention's logits."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, nodes: Tensor, bias: Tensor) -> Tensor:
        rows, count, width = nodes.shape
        qkv = self.qkv(_norm(nodes)).view(rows, count, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None])
        nodes = nodes + self.attended(seen.transpose(1, 2).reshape(rows, count, width))
        return nodes + self.mlp(_norm(nodes))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])  # without weights: the linear layer that follows each has them


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=EPSILON)
