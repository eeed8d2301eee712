"""Prompt lookup: the draft is how the text went on the last time that it looked like this. No model, no training.

The longest suffix of the text that stood in it before is looked up, and what followed it then is drafted: answers quote
their prompts and repeat themselves (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; LLMA, Yang et
al. 2023, arXiv 2304.04487). A row without a match gets no draft. The draft is a fixed function of the text, so its q is
one-hot under every rule.

Shapes: R rows, L positions of text, n slots, M the longest suffix compared.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.base import Context, Draft
from drafters.checkpoint import read_config, whole_number
from verifier.cache import RaggedCache
from verifier.errors import DrafterError
from verifier.target import Target

FORMAT = 1  # of the configuration
SUFFIX = 8  # M: tokens compared at most
# How often the next token is right after so many that are as they were then: 1, 2, ... 16 or more (measured on
# SmolLM2-135M's answers to benchmark prompts; experiments/LOG.md).
RIGHT = (0.26, 0.58, 0.63, 0.63, 0.77, 0.79, 0.82, 0.84, 0.86, 0.88, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96)


@dataclass
class Continuation:
    """How the text of each row went on, the last time that it looked like this."""

    tokens: Tensor  # [R, n] int64
    matched: Tensor  # [R] int64: tokens that were the same then, at most SUFFIX; 0: none, and the tokens mean nothing

    def matches(self, slots: int, longest: int) -> Tensor:
        """How many tokens before each of the first slots are as they were then, int64 [R, slots], `longest` at most."""
        ahead_n = torch.arange(slots, device=self.matched.device)
        return torch.where(self.matched[:, None] > 0, (self.matched[:, None] + ahead_n).clamp(max=longest), 0)

    def draft(self, min_match: int = 1) -> Draft:
        """All of it as a draft, as probable as such continuations are; nothing where less than `min_match` matches."""
        slots = self.tokens.shape[1]
        rates = torch.tensor([0.0, *RIGHT], device=self.matched.device).log()
        counts_R = torch.where(self.matched >= min_match, slots, 0)
        return Draft(self.tokens, log_probs=rates[self.matches(slots, len(RIGHT))].cumsum(1), counts=counts_R)


class NoState:
    """Nothing is remembered: the text says it all."""

    memory_bytes = 0

    def move(self, source: int, target: int) -> None:
        pass

    def reset(self, row: int) -> None:
        pass

    def clean(self) -> None:
        pass


@dataclass(frozen=True)
class PromptLookupDrafter:
    """Drafts what followed the longest earlier occurrence of the text's end.

    Args:
        max_positions: of the target.
        block_size: tokens drafted at most.
        min_match: tokens that must be as they were then for anything to be drafted, at most SUFFIX.
    """

    max_positions: int
    block_size: int = 8
    min_match: int = 1
    taps: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path, target: Target) -> "PromptLookupDrafter":
        """The drafter that `config.json` in `folder` describes; DrafterError where a setting is wrong."""
        config, file = read_config(folder), folder / "config.json"
        known = {"drafter", "format", "block_size", "min_match"}
        if set(config) != known or config["format"] != FORMAT:
            raise DrafterError(f"{file}: {config}; expected the keys {sorted(known)}, and format={FORMAT}")
        if whole_number(config, "min_match", file) > SUFFIX:
            raise DrafterError(f"{file}: min_match={config['min_match']}; no more than {SUFFIX} tokens are compared")
        return cls(target.max_positions, whole_number(config, "block_size", file), config["min_match"])

    def start(self, rows: int, max_length: int) -> NoState:
        return NoState()

    def observe(self, state: NoState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        pass

    @torch.inference_mode()
    def draft(self, state: NoState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context) -> Draft:
        return continuation(context.text, context.positions[:, 0] - 1, slots).draft(self.min_match)


def continuation(history: Tensor, anchors: Tensor, slots: int) -> Continuation:
    """What followed the longest earlier occurrence of a suffix that ends at the anchor; of equals, the latest.

    Args:
        history: int64 [R, L], the text of each row; what stands behind the anchor is ignored.
        anchors: int64 [R], the anchor's position in it.
        slots: how many tokens; a short loop goes round.
    """
    length = history.shape[1]
    columns_L = torch.arange(length, device=history.device)
    back_M = torch.arange(SUFFIX, device=history.device)
    from_RM = anchors[:, None] - back_M
    suffix_RM = history.gather(1, from_RM.clamp(min=0)).masked_fill(from_RM < 0, -2)
    before_RLM = pad(history, (SUFFIX - 1, 0), value=-1).unfold(1, SUFFIX, 1).flip(-1)  # [r, l, m]: m places before l
    matched_RL = (before_RLM == suffix_RM[:, None, :]).int().cumprod(-1).sum(-1)
    matched_RL = matched_RL.masked_fill(columns_L >= anchors[:, None], 0)
    found_R = (matched_RL * length + columns_L).argmax(-1)
    distance_R1 = (anchors - found_R).clamp(min=1)[:, None]
    ahead_Rn = found_R[:, None] + 1 + torch.arange(slots, device=history.device) % distance_R1
    matched_R = matched_RL.gather(1, found_R[:, None])[:, 0]
    return Continuation(history.gather(1, ahead_Rn.clamp(max=length - 1)), matched_R)
