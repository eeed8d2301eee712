"""The configuration of a DFlash drafter: the published `config.json`, read strictly.

A key that this code doesn't know may change what the drafter computes, so it is refused rather than ignored.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from verifier.errors import DrafterError
from verifier.target import Target

# Qwen3Config has a default for each of these, which would be silently wrong.
REQUIRED = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
REQUIRED |= {"head_dim", "vocab_size", "max_position_embeddings"}
# Of older transformers, or of no effect on the computation; Qwen3Config turns the first two into `rope_parameters`.
OLDER = {"rope_theta", "rope_scaling", "torch_dtype", "auto_map", "pretraining_tp", "_name_or_path"}
OURS = {"block_size", "num_target_layers", "dflash_config", "drafter", "target", "training"}
INNER = {"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "predicts", "candidates"}


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a DFlash drafter: what its `config.json` says.

    Attributes:
        backbone: sizes, rotary embedding and norms of the draft layers.
        taps: decoder layers of the target whose outputs are the features (`target_layer_ids`; -1: the embedding).
        block_size: inputs of a full block, B.
        predicts: "same" (published: B - 1 tokens drafted) or "next" (ours: B tokens).
        mask_token_id: the token whose embedding fills the slots behind the anchor; None for a learned vector.
        num_target_layers: layers of the target it was trained for; None where the checkpoint doesn't say.
        candidates: tokens kept a slot, K.
    """

    backbone: Qwen3Config = field(repr=False)
    taps: tuple[int, ...]
    block_size: int
    predicts: Literal["next", "same"]
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    candidates: int = 16

    @property
    def slots(self) -> int:
        """Tokens that a full block drafts."""
        return self.block_size if self.predicts == "next" else self.block_size - 1

    @classmethod
    def for_target(
        cls, target: Target, layers: int, taps: Sequence[int], block_size: int = 8, mask_token_id: int | None = None
    ) -> "DFlashConfig":
        """A drafter to be trained for `target`, with `layers` draft layers of the same sizes; predicts "next"."""
        theirs = target.config
        rope = deepcopy(theirs.rope_parameters)
        backbone = Qwen3Config(
            hidden_size=theirs.hidden_size,
            intermediate_size=theirs.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=theirs.num_attention_heads,
            num_key_value_heads=theirs.num_key_value_heads,
            head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_positions,
            rms_norm_eps=theirs.rms_norm_eps,
            rope_parameters=rope.get("full_attention", rope),  # Gemma 3 has one rotary embedding a layer type
        )
        return cls(backbone, tuple(taps), block_size, "next", mask_token_id, len(target.layers))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "DFlashConfig":
        """Read a `config.json`.

        Raises:
            DrafterError: a key is missing, contradicts another, or is unknown and set: it may change the computation.
        """
        inner = raw.get("dflash_config")
        if not isinstance(inner, dict):
            raise DrafterError("config.json has no dflash_config: this is not a DFlash drafter")
        backbone_keys = set(Qwen3Config().to_dict()) | OLDER
        _refuse_unknown(raw, backbone_keys | OURS, "config.json")
        _refuse_unknown(inner, INNER, "dflash_config")
        both = {**raw, **inner}
        missing = sorted((REQUIRED | {"target_layer_ids", "block_size"}) - both.keys())
        if "rope_theta" not in raw and "rope_parameters" not in raw:
            missing.append("rope_theta")
        if missing:
            raise DrafterError(f"config.json of the drafter lacks {', '.join(missing)}; add what it was trained with")
        for key in OURS & INNER & raw.keys():
            if raw[key] != both[key]:
                raise DrafterError(f"config.json sets {key}={raw[key]}, but dflash_config {key}={both[key]}")
        try:
            return cls(
                Qwen3Config.from_dict({key: raw[key] for key in backbone_keys & raw.keys()}),
                tuple(_whole("target_layer_ids", index) for index in inner["target_layer_ids"]),
                _whole("block_size", both["block_size"]),
                inner.get("predicts", "same"),
                None if inner.get("mask_token_id") is None else _whole("mask_token_id", inner["mask_token_id"]),
                both.get("num_target_layers"),
                _whole("candidates", inner.get("candidates", 16)),
            )
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise DrafterError(
                f"config.json of the drafter holds a value that can't be used: {error}; set what it was trained with"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict` reads."""
        inner = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.taps),
            "predicts": self.predicts,
            "candidates": self.candidates,
        }
        return {
            **self.backbone.to_dict(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": inner,
        }

    def check(self, target: Target) -> None:
        """Raise DrafterError where the drafter doesn't fit the target or asks for what isn't built here."""
        ours, layers, rows = self.backbone, len(target.layers), len(target.embedding_weight())
        for name, value, fits in (
            ("hidden_size", ours.hidden_size, target.hidden_size),
            ("vocab_size", ours.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, layers),
        ):
            if value not in (None, fits):
                raise DrafterError(f"the drafter has {name}={value}, the target {fits}: it is another target's drafter")
        if not self.taps or not all(-1 <= index < layers for index in self.taps):
            raise DrafterError(f"target_layer_ids={list(self.taps)} must name layers -1..{layers - 1} of the target")
        if self.predicts not in ("next", "same"):
            raise DrafterError(f'predicts={self.predicts!r} must be "next", or "same" as in published checkpoints')
        if self.slots < 1 or self.candidates < 1:
            raise DrafterError(
                f"block_size={self.block_size} with predicts={self.predicts!r} drafts {self.slots} tokens of "
                f"candidates={self.candidates}: both must be at least 1"
            )
        if set(ours.layer_types or ()) != {"full_attention"}:
            raise DrafterError(f"layer_types={ours.layer_types}: only draft layers with full_attention are built here")
        if self.mask_token_id is not None:
            ends = target.config.eos_token_id
            if not 0 <= self.mask_token_id < rows:
                raise DrafterError(f"mask_token_id={self.mask_token_id} must be 0..{rows - 1}, a row of the embedding")
            if self.mask_token_id in (ends if isinstance(ends, list) else [ends]):
                raise DrafterError(f"mask_token_id={self.mask_token_id} ends texts of the target; it can't be the mask")


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be whole")
    return value


def _refuse_unknown(settings: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(key for key, value in settings.items() if key not in known and value not in (None, False))
    if unknown:
        raise DrafterError(
            f"{where} sets {', '.join(unknown)}, unknown here: it may change what the drafter computes, so it isn't "
            "ignored; remove it if it doesn't"
        )
