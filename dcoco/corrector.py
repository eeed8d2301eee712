"""The contextual corrector: how well each candidate of a slot fits each candidate of the next, for all slots at once.

A parallel drafter predicts its slots without knowing which token the others will take, so its best candidates may not
fit together. The corrector scores neighbours in one small batched pass; the walk then picks one coherent path. The
score of candidate j of slot t+1 after candidate i of slot t is

    S[t+1](j | i) = u[t+1, j] + pair(i, j),      pair(i, j) = w . act(A r[t, i] + B r[t+1, j] + C s[t] + b)

with u the drafter's log-probability, r a representation of the candidate (its embedding, the slot's hidden state, how
probable it is) and s[t] of the two slots. The first layer is a sum of three terms, so the K x K part is an addition,
an activation and a dot product. The anchor is slot 0 and its own only candidate. Where i and j are both what the text
said after the same words before (`dcoco/recall.py`), a learned vector for the length of that match joins the sum. `w`
starts at zero: an untrained corrector is exactly the plain drafter.

Shapes: R rows, n slots, K candidates, H hidden size, D width of a representation, M width of the pair score.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dcoco.errors import DrafterError
from dcoco.recall import LONGEST, Recalled
from drafters.base import Lattice
from drafters.checkpoint import load_strictly, read_tensors
from verifier.linear import pack_linears
from verifier.target import Target


@dataclass(frozen=True)
class CorrectorConfig:
    """Sizes of a corrector: the hidden size of its drafter, of a representation, and of the pair score."""

    hidden_size: int
    width: int = 128
    pair_width: int = 256


@dataclass
class Scores:
    """Transition scores, unnormalised log-weights.

    first [R, K]: candidates of slot 1 after the anchor; rest [R, n - 1, K, K]: [.., i, j] for j after i.
    """

    first: Tensor
    rest: Tensor

    @classmethod
    def unary(cls, lattice: Lattice) -> "Scores":
        """The drafter's own scores, the same after every predecessor: the walk over them is the plain drafter."""
        log_probs = lattice.log_probs
        candidates = log_probs.shape[-1]
        return cls(log_probs[:, 0], log_probs[:, 1:, None, :].expand(-1, -1, candidates, -1))


class Corrector(nn.Module):
    """Scores neighbouring candidates of a lattice. About 512 x H + 136 k parameters, no vocabulary-sized table."""

    def __init__(self, config: CorrectorConfig):
        super().__init__()
        self.config = config
        hidden, width, pair = config.hidden_size, config.width, config.pair_width
        self.token = nn.Linear(hidden, width, bias=False)
        self.slot = nn.Linear(hidden, width, bias=False)
        self.scalars = nn.Linear(3, width)
        self.state = nn.Linear(2 * hidden, width, bias=False)
        self.pair_before = nn.Linear(width, pair, bias=False)
        self.pair_after = nn.Linear(width, pair, bias=False)
        self.pair_state = nn.Linear(width, pair)
        self.pair_recalled = nn.Embedding(LONGEST + 1, pair, padding_idx=0)
        self.pair_out = nn.Linear(pair, 1, bias=False)
        nn.init.zeros_(self.pair_out.weight)

    def forward(self, lattice: Lattice, table: Tensor, recalled: Recalled | None = None) -> Scores:
        """Score all pairs of a lattice; `table` [V, D] is what `token_table` makes of the target's embedding."""
        anchor_RD, others_RnKD, states_RnM = self.represent(lattice, lambda ids: F.embedding(ids, table))
        after_RnKM = self.pair_after(others_RnKD) + states_RnM[:, :, None]
        before_R1M, before_RmKM = self.pair_before(anchor_RD)[:, None], self.pair_before(others_RnKD[:, :-1])
        first = self.pair(before_R1M + after_RnKM[:, 0])
        rest = self.pair(before_RmKM[:, :, :, None] + after_RnKM[:, 1:, None])
        if recalled is not None:
            row, column_Rn = torch.arange(len(first), device=first.device)[:, None], recalled.column
            slot = torch.arange(column_Rn.shape[1], device=first.device)
            before_RnM = torch.cat([before_R1M, before_RmKM[row, slot[:-1], column_Rn[:, :-1]]], dim=1)
            again_RnM = before_RnM + after_RnKM[row, slot, column_Rn] + self.pair_recalled(recalled.matched)
            again_Rn = self.pair(again_RnM)
            first[row[:, 0], column_Rn[:, 0]] = again_Rn[:, 0]
            rest[row, slot[:-1], column_Rn[:, :-1], column_Rn[:, 1:]] = again_Rn[:, 1:]
        return Scores(lattice.log_probs[:, 0] + first, lattice.log_probs[:, 1:, None] + rest)

    def token_table(self, embedding: Tensor) -> Tensor:
        """Projections [.., D] of token embeddings [.., H]: of the whole vocabulary once, before decoding."""
        return self.token(_norm(embedding))

    def represent(self, lattice: Lattice, tokens: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Representations of the anchor [R, D] and of all candidates [R, n, K, D], and the summand [R, n, M] of each
        pair of slots. `tokens` gives the projections [.., D] of token ids [..]."""
        hidden_RnH = _norm(torch.cat([lattice.anchor_hidden[:, None], lattice.hidden], dim=1))  # slot 0 is the anchor
        states_RnM = self.pair_state(_norm(self.state(torch.cat([hidden_RnH[:, :-1], hidden_RnH[:, 1:]], dim=-1))))
        slots_RnD = self.slot(hidden_RnH)  # [R, n + 1, D]
        certain = torch.zeros_like(lattice.log_probs[:, 0, :1])  # the anchor's log-probability
        anchor_R1D = self._represent(tokens(lattice.anchors[:, None]), certain, slots_RnD[:, 0])
        others_RnKD = self._represent(tokens(lattice.ids), lattice.log_probs, slots_RnD[:, 1:])
        return anchor_R1D[:, 0], others_RnKD, states_RnM

    def pair(self, summed: Tensor) -> Tensor:
        """Pair scores [...] float32 of summed first layers [..., M] (overwritten)."""
        return self.pair_out(F.relu_(summed)).squeeze(-1).float()

    def _represent(self, tokens: Tensor, log_probs: Tensor, slots: Tensor) -> Tensor:
        """Representations [..., K, D] of candidates: tokens [..., K, D], log_probs [..., K], slots [..., D]."""
        rank = torch.arange(log_probs.shape[-1], device=log_probs.device) / 16.0
        scalars = torch.stack([log_probs, log_probs - log_probs[..., :1], rank.expand_as(log_probs)], dim=-1)
        return _norm(tokens + slots[..., None, :] + self.scalars(scalars.to(slots.dtype)))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def save_corrector(folder: Path, corrector: Corrector, training: dict[str, Any]) -> None:
    """Write `corrector.json` and `corrector.safetensors` (bfloat16) beside the drafter that it belongs to."""
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in corrector.state_dict().items()}
    save_file(state, str(folder / "corrector.safetensors"))
    config = {**asdict(corrector.config), "training": training}
    (folder / "corrector.json").write_text(json.dumps(config, indent=1) + "\n")


def load_corrector(folder: Path, target: Target) -> Corrector | None:
    """The corrector beside a drafter's checkpoint, ready to run; None where there is none.

    Raises DrafterError where its configuration or its tensors don't fit.
    """
    file = folder / "corrector.json"
    if not file.exists():
        return None
    config = json.loads(file.read_text())
    config.pop("training", None)
    names = {field.name for field in fields(CorrectorConfig)}
    if set(config) != names:
        raise DrafterError(f"{file} has the keys {sorted(config)}; expected {sorted(names)}")
    if config["hidden_size"] != target.hidden_size:
        raise DrafterError(f"{file}: hidden_size={config['hidden_size']}, but the target's is {target.hidden_size}")
    corrector = Corrector(CorrectorConfig(**config))
    load_strictly(corrector, read_tensors(folder / "corrector.safetensors"), folder)
    corrector.eval().requires_grad_(False).to(device=target.device, dtype=target.dtype)
    pack_linears(corrector)
    return corrector
