"""Speculative sampling: a separate small language model drafts token by token.

Leviathan, Kalman and Matias 2022 (arXiv 2211.17192), algorithm 1, lines 1 to 4; Chen et al. 2023 (arXiv 2302.01318),
algorithm 2. Any transformers causal LM with the target's tokenizer will do. It runs over a ragged cache of its own,
which each draft brings up to date with the text: the prompt at first, later the one or two tokens that it has not run
yet. What it ran for drafts that were accepted is kept.

Shapes: S rows allocated, R rows, Q tokens a row, n slots, B block size, L positions of text, H hidden size, W tokens
that may be drafted.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters.base import Context, Draft, finish
from drafters.block import draft_vocabulary
from drafters.checkpoint import check_keys, read_config, read_tensors, whole_number
from verifier.cache import RaggedCache
from verifier.errors import DrafterError, TargetError
from verifier.linear import pack_linears
from verifier.loading import load_whole, quiet_transformers
from verifier.packing import Packing
from verifier.target import Target

FORMAT = 1  # of the checkpoint
BLOCK = 4  # tokens drafted by a model that comes without a checkpoint of ours
LONG = 32  # a row that lacks more tokens runs them alone ...
CHUNK = 256  # ... so many at a time


@dataclass
class AutoregressiveState:
    """The draft model's keys and values; `cache.lengths` counts the tokens that are surely the text's."""

    cache: RaggedCache
    drafted: Tensor  # [S, B - 1] int64: the tokens run behind those, the last draft's; -1: none
    bytes_per_token: int

    @property
    def memory_bytes(self) -> int:
        return self.cache.rows * self.cache.max_length * self.bytes_per_token

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.drafted[target] = -1  # their keys stay behind

    def reset(self, row: int) -> None:
        self.cache.lengths[row] = 0
        self.drafted[row] = -1

    @torch.inference_mode()
    def clean(self) -> None:
        self.cache.clean()


class AutoregressiveDrafter:
    """Drafts with a language model of its own.

    Args:
        target: whose vocabulary is drafted from.
        model: the draft model, on the target's device. Its tokens are the target's, but for padding of either.
        block_size: tokens drafted at most (gamma in the papers).
        draft_ids: int64 [W], ascending: the tokens that may be drafted; None for all that both have.

    Raises:
        DrafterError: draft_ids are not ascending ids that both vocabularies have.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, model: Target, block_size: int = BLOCK, draft_ids: Tensor | None = None):
        self.model = model
        self.block_size = block_size
        self.max_positions = model.max_positions
        self.draft_ids = draft_vocabulary(draft_ids, min(target.vocab_size, model.vocab_size)).to(model.device)
        if len(self.draft_ids) < model.vocab_size:
            model.head = _trimmed(model, self.draft_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.config.to_json_string()}, {len(self.draft_ids)} draft_ids)"

    @classmethod
    def load(cls, folder: Path, target: Target) -> "AutoregressiveDrafter":
        """The drafter in `folder`, or the plain transformers model; DrafterError where anything doesn't fit."""
        config, file = read_config(folder), folder / "config.json"
        if "drafter" not in config:
            return cls(target, _load_model(folder, target))
        known = {"drafter", "format", "block_size", "draft_vocab_size", "target", "training"}
        check_keys(config, known, file)
        if config["format"] != FORMAT:
            raise DrafterError(f"{file}: format={config['format']!r}; this version reads format={FORMAT}")
        block_size, size = whole_number(config, "block_size", file), config["draft_vocab_size"]
        tensors = read_tensors(folder / "draft_ids.safetensors")
        if set(tensors) != {"draft_ids"} or list(tensors["draft_ids"].shape) != [size]:
            found = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise DrafterError(
                f"{folder / 'draft_ids.safetensors'} holds {found}, expected draft_ids of draft_vocab_size={size!r}: "
                "get both from the same place"
            )
        return cls(target, _load_model(folder / "model", target), block_size, tensors["draft_ids"])

    def start(self, rows: int, max_length: int) -> AutoregressiveState:
        length = min(max_length, self.max_positions) + max(self.block_size, LONG)
        device = self.model.device
        drafted = torch.full((rows, self.block_size - 1), -1, device=device)
        return AutoregressiveState(RaggedCache(rows, length, device), drafted, self.model.cache_bytes_per_token)

    def observe(self, state: AutoregressiveState, first: int, taps: list[Tensor], counts_R: Tensor) -> None:
        """Nothing to take in: the draft model reads the text."""

    @torch.inference_mode()
    def draft(
        self, state: AutoregressiveState, anchors_R: Tensor, cache: RaggedCache, slots: int, context: Context
    ) -> Draft:
        rows = len(anchors_R)
        # Up to the anchor; a row beyond the draft model's positions gets no draft, and stays where they end.
        ends = [min(length + 1, self.max_positions) for length in cache.lengths[:rows]]
        hidden_RH = self._catch_up(state, context.text.clamp(max=self.model.vocab_size - 1), ends)
        picks = [context.pick(self.model.logits(hidden_RH), 0, self.draft_ids)]
        state.cache.lengths[:rows] = ends
        for slot in range(1, slots):
            tokens_R1 = self.draft_ids[picks[-1].column][:, None]
            packing = Packing([1] * rows, state.cache.device, state.cache.lengths[:rows])
            hidden = self.model.forward(tokens_R1, state.cache, packing=packing).hidden
            picks.append(context.pick(self.model.logits(hidden.view(rows, -1)), slot, self.draft_ids))
            state.cache.lengths[:rows] = [end + slot for end in ends]
        state.cache.lengths[:rows] = ends
        draft = finish(picks, self.draft_ids)
        state.drafted[:rows] = -1
        state.drafted[:rows, : slots - 1] = draft.tokens[:, :-1]
        return draft

    def _catch_up(self, state: AutoregressiveState, text_RL: Tensor, ends: list[int]) -> Tensor:
        """Run what each row lacks of the first ends[r] tokens of its text: the last one's hidden state [R, H]."""
        cache, rows, device = state.cache, len(ends), state.cache.device
        starts = cache.lengths[:rows]
        if self.block_size > 1:
            places_Rn = torch.tensor(starts, device=device)[:, None] + torch.arange(self.block_size - 1, device=device)
            text_Rn = text_RL.gather(1, places_Rn.clamp(max=text_RL.shape[1] - 1))
            accepted_R = (text_Rn == state.drafted[:rows]).long().cumprod(1).sum(1)
            starts = [start + kept for start, kept in zip(starts, accepted_R.tolist(), strict=True)]
        # The last token is run again where it has been: its hidden state is wanted.
        cache.lengths[:rows] = [min(start, end - 1) for start, end in zip(starts, ends, strict=True)]
        for row, end in enumerate(ends):
            while end - cache.lengths[row] > LONG:
                start = cache.lengths[row]
                count = min(CHUNK, end - 1 - start)
                self.model.forward(text_RL[row : row + 1, start : start + count], cache, first=row)
                cache.lengths[row] += count
        starts = cache.lengths[:rows]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        packing = Packing(counts, device, starts)
        places_RQ = torch.tensor(starts, device=device)[:, None] + torch.arange(packing.queries, device=device)
        ids_RQ = text_RL.gather(1, places_RQ.clamp(max=text_RL.shape[1] - 1))
        hidden = self.model.forward(ids_RQ, cache, packing=packing).hidden.flatten(0, 1)
        return hidden[packing.find(torch.tensor(counts, device=device)[:, None] - 1)[:, 0]]


def save(
    folder: Path,
    model: Any,
    block_size: int,
    draft_ids: Tensor,
    identity: dict[str, Any],
    training: dict[str, Any],
) -> None:
    """Write a checkpoint: a transformers model (it becomes bfloat16), its target (`target_identity`), its training."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "drafter": "autoregressive",
        "format": FORMAT,
        "block_size": block_size,
        "draft_vocab_size": len(draft_ids),
        "target": identity,
        "training": training,
    }
    with quiet_transformers():
        model.to(torch.bfloat16).save_pretrained(folder / "model")
    save_file({"draft_ids": draft_ids.int()}, folder / "draft_ids.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _load_model(folder: Path, target: Target) -> Target:
    loaded = load_whole(folder, "the draft model", DrafterError, target.dtype)
    try:
        return Target(loaded.to(target.device))
    except TargetError as error:
        raise DrafterError(f"the model in {folder} can't draft, as it couldn't be a target: {error}") from error


def _trimmed(model: Target, draft_ids: Tensor) -> nn.Module:
    """The head for some tokens only: columns left out can't win, and cost nothing."""
    bias = getattr(model.head, "bias", None)
    head = nn.Linear(model.hidden_size, len(draft_ids), bias=bias is not None, device="meta")
    head.weight = nn.Parameter(model.head_weight(draft_ids), requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias[draft_ids], requires_grad=False)
    packed = nn.Sequential(head)
    pack_linears(packed)
    return packed
