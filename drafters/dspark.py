"""DSpark's heads on a block drafter: each token is chosen knowing the one before it, and how sure it is.

The block drafter predicts all slots at once, as if apart. The Markov head then goes from slot to slot and corrects the
logits of the whole draft vocabulary for the token x chosen just before (the anchor, in slot 1), by a low-rank product:

    logits[t](v) = base[t](v) + <A[x] * g, B[v]>,    g = 1, or gated: sigmoid(G [h[t]; A[x]])

The confidence head tells from h[t] and A[x] how probably the target will accept the token, if it has accepted those
before it; that is what the verification budget goes by. B starts at zero: untrained, this is exactly the plain drafter.

After DSpark (2026, arXiv 2607.05147) and its code (deepseek-ai/DeepSpec): rank 256, a linear confidence head. There A
covers the target's vocabulary; here the draft vocabulary, and all other tokens share a row of zeros. (Their third head,
with a state that goes through the block, and their confidence-scheduled server are not here.)

Shapes: R rows, n slots, H hidden size, W draft vocabulary, E rank.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Context, Draft, DraftState, Pick, finish
from drafters.block import BlockDrafter
from drafters.checkpoint import check_keys, load_strictly, read_config, read_tensors, whole_number, write_checkpoint
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.linear import pack_linears
from verifier.target import Target

FORMAT = 1  # of the checkpoint


@dataclass(frozen=True)
class DSparkConfig:
    """Shape of the heads."""

    rank: int = 256
    gated: bool = False


class DSparkDrafter(nn.Module):
    """A frozen block drafter, ready to draft, with heads of its own; its parameters are only theirs.

    Raises DrafterError where the drafter below isn't one that drafts blocks.
    """

    def __init__(self, base: BlockDrafter, target: Target, config: DSparkConfig):
        super().__init__()
        if not isinstance(base, BlockDrafter):
            raise DrafterError(
                f"dspark stands on a drafter of blocks, not on a {type(base).__name__}: name another base"
            )
        self.config = config
        self.block_size, self.taps, self.max_positions = base.block_size, base.taps, base.max_positions
        hidden, words, rank = target.hidden_size, len(base.draft_ids), config.rank
        self.before = nn.Embedding(words + 1, rank, padding_idx=words)  # A; the last row stands for all other tokens
        self.after = nn.Linear(rank, words, bias=False)  # B
        self.gate = nn.Linear(hidden + rank, rank, bias=False) if config.gated else None  # G
        self.confidence = nn.Linear(hidden + rank, 1)
        self.column_of: Tensor  # of every token, its column in the draft vocabulary; W where it has none
        column_of = torch.full((target.vocab_size,), words, device=target.device)
        column_of[base.draft_ids] = torch.arange(words, device=target.device)
        self.register_buffer("column_of", column_of, persistent=False)
        self._base, self._target = [base], [target]  # in lists: their weights are not the heads'
        nn.init.normal_(self.before.weight, std=0.02)
        nn.init.zeros_(self.before.weight[words])
        nn.init.zeros_(self.after.weight)
        self.to(target.device)

    @property
    def base(self) -> Any:
        """The drafter below."""
        return self._base[0]

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype, in which the drafter below runs."""
        return self._target[0].dtype

    def prepare(self) -> "DSparkDrafter":
        """Make ready for drafting: the target's dtype, packed weights."""
        self.eval().requires_grad_(False).to(self.dtype)
        pack_linears(self)
        return self

    def save(self, folder: Path, base: str, identity: dict[str, Any], training: dict[str, Any]) -> None:
        """Write the heads alone, in bfloat16; `base` is the folder of the drafter below, relative to this one."""
        config = {"drafter": "dspark", "format": FORMAT, "base": base, **asdict(self.config)}
        config |= {"target": identity, "training": training}
        write_checkpoint(self, folder, config)

    @classmethod
    def load(cls, folder: Path, target: Target, base: BlockDrafter) -> "DSparkDrafter":
        """The heads in `folder`, ready to draft on `base`; DrafterError where anything doesn't fit."""
        config, file = read_config(folder), folder / "config.json"
        names = {field.name for field in fields(DSparkConfig)}
        known = names | {"drafter", "format", "base", "target", "training"}
        check_keys(config, known, file)
        if config["format"] != FORMAT:
            raise DrafterError(f"{file}: format={config['format']!r}; this version reads format={FORMAT}")
        if type(config["gated"]) is not bool:
            raise DrafterError(f"{file}: gated={config['gated']!r} must be true or false")
        drafter = cls(base, target, DSparkConfig(whole_number(config, "rank", file), config["gated"]))
        load_strictly(drafter, read_tensors(folder / "model.safetensors"), folder)
        return drafter.prepare()

    def start(self, rows: int, max_length: int) -> DraftState:
        return self.base.start(rows, max_length)

    def observe(self, state: DraftState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        self.base.observe(state, first, taps, counts_R)

    @torch.inference_mode()
    def draft(self, state: DraftState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context) -> Draft:
        _, hidden_RnH = self.base.run(state, anchors_R, cache, slots)
        return self.choose(anchors_R, hidden_RnH, context)

    def choose(self, anchors_R: Tensor, hidden_RnH: Tensor, context: Context) -> Draft:
        """One token a slot, left to right, from the hidden states of a block."""
        base_RnW, column_R = self.base.logits(hidden_RnH).float(), self.column_of[anchors_R]
        picks: list[Pick] = []
        for slot in range(hidden_RnH.shape[1]):
            correction_RW, confidence_R = self.heads(hidden_RnH[:, slot], column_R)
            pick = context.pick(base_RnW[:, slot] + correction_RW.float(), slot, self.base.draft_ids)
            picks.append(replace(pick, log_prob=F.logsigmoid(confidence_R.float())))
            column_R = pick.column
        return finish(picks, self.base.draft_ids)

    def heads(self, hidden: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Corrections [.., W] and the confidence's logits [..] of slots with hidden states [.., H], behind the tokens
        of these columns (int64 [..]) of the draft vocabulary."""
        before = self.before(column)
        seen = torch.cat([hidden, before], dim=-1)
        gated = before if self.gate is None else before * self.gate(seen).sigmoid()
        return self.after(gated), self.confidence(seen).squeeze(-1)
