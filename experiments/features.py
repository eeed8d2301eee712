"""What a drafter learns from, computed once: the target's taps, keys and values over its own answers.

Running the target costs more than training on what it leaves, so its bf16 features are written to one memory-mapped
file a tensor, sequence after sequence, and every epoch reads them from there. Writing can be interrupted and goes on
where it stopped.

Shapes: N tokens of all sequences, H hidden size, G key/value heads, D head size, R sequences, P positions.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from drafters.base import TrainingBatch
from verifier.cache import RaggedCache
from verifier.errors import ConfigError
from verifier.target import Target

CHUNK = 128  # sequences between two points at which writing can go on


@dataclass(frozen=True)
class Sequence_:
    """One prompt with the target's answer, and where its tokens lie in the store."""

    prompt: int  # tokens of the prompt
    length: int  # tokens of prompt and answer
    start: int  # index of the first one in the store


def read_answers(file: Path, limit: int | None = None, skip: int = 0, seed: int = 0) -> list[dict[str, list[int]]]:
    """Answers from JSON lines of {"prompt_ids", "response_ids"}, shuffled; those too short for a block are skipped."""
    answers = [json.loads(line) for line in file.open()]
    answers = [answer for answer in answers if len(answer["response_ids"]) >= 4 and answer["prompt_ids"]]
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(seed)).tolist()
    return [answers[index] for index in order[skip:][:limit]]


class FeatureStore:
    """Features of many sequences on disk.

    Args:
        folder: where the files are; made by `build`.
        taps, layers: which tensors are read back; they must be among those written.
        device: where batches go; the store itself stays on disk.
    """

    def __init__(self, folder: Path, taps: Sequence[int], layers: Sequence[int], device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        meta = json.loads((folder / "meta.json").read_text())
        missing = [f"tap {tap}" for tap in taps if tap not in meta["taps"]]
        missing += [f"layer {layer}" for layer in layers if layer not in meta["layers"]]
        if missing:
            raise ConfigError(f"the features in {folder} lack {', '.join(missing)}: build them in another folder")
        self.sequences = [Sequence_(*entry) for entry in meta["sequences"]]
        shapes, total = meta["shapes"], sum(sequence.length for sequence in self.sequences)
        self.ids = _open(folder / "ids.bin", (total,), torch.int32)
        self.taps = [_open(folder / f"tap{tap}.bin", (total, *shapes["tap"]), torch.bfloat16) for tap in taps]
        self.keys = {
            layer: _open(folder / f"keys{layer}.bin", (total, *shapes["kv"]), torch.bfloat16) for layer in layers
        }
        self.values = {
            layer: _open(folder / f"values{layer}.bin", (total, *shapes["kv"]), torch.bfloat16) for layer in layers
        }

    def batch(self, chosen: Sequence[int], anchors_RA: Tensor) -> TrainingBatch:
        """The features of the chosen sequences, padded to the longest, with the given anchors."""
        spans = [slice(s.start, s.start + s.length) for s in (self.sequences[index] for index in chosen)]

        def gather(store: Tensor) -> Tensor:
            return pad_sequence([store[span] for span in spans], batch_first=True).to(self.device)

        return TrainingBatch(
            ids=gather(self.ids).long(),
            anchors=anchors_RA.to(self.device),
            taps=[gather(tap) for tap in self.taps],
            keys={layer: gather(store).transpose(1, 2) for layer, store in self.keys.items()},
            values={layer: gather(store).transpose(1, 2) for layer, store in self.values.items()},
        )


@torch.inference_mode()
def build(
    folder: Path, target: Target, answers: Sequence[dict[str, list[int]]], taps: Sequence[int], layers: Sequence[int]
) -> None:
    """Run the target over the answers and write its features; goes on where an earlier call stopped.

    Raises ConfigError where there are no answers, or the folder holds the features of something else.
    """
    if not answers:
        raise ConfigError("no answers to compute features of: raise limit, or lower skip")
    folder.mkdir(parents=True, exist_ok=True)
    sequences, start = [], 0
    for answer in answers:
        prompt, length = len(answer["prompt_ids"]), len(answer["prompt_ids"]) + len(answer["response_ids"])
        sequences.append(Sequence_(prompt, length, start))
        start += length
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    meta = {
        "taps": list(taps),
        "layers": list(layers),
        "shapes": {"tap": [target.hidden_size], "kv": [heads, size]},
        "sequences": [list(asdict(sequence).values()) for sequence in sequences],
    }
    meta_file, done_file = folder / "meta.json", folder / "done"
    if meta_file.exists() and json.loads(meta_file.read_text()) != meta:
        raise ConfigError(f"{folder} holds the features of other answers, taps or layers: name another folder")
    meta_file.write_text(json.dumps(meta))

    ids = _open(folder / "ids.bin", (start,), torch.int32)
    tap_files = [_open(folder / f"tap{tap}.bin", (start, target.hidden_size), torch.bfloat16) for tap in taps]
    key_files = [_open(folder / f"keys{layer}.bin", (start, heads, size), torch.bfloat16) for layer in layers]
    value_files = [_open(folder / f"values{layer}.bin", (start, heads, size), torch.bfloat16) for layer in layers]
    done = int(done_file.read_text()) if done_file.exists() else 0
    with tqdm(total=start, initial=sum(s.length for s in sequences[:done]), unit="tok", desc="features") as bar:
        for first in range(done, len(sequences), CHUNK):
            chunk = sorted(range(first, min(first + CHUNK, len(sequences))), key=lambda index: sequences[index].length)
            for part in range(0, len(chunk), 8):
                rows = chunk[part : part + 8]
                tokens = [torch.tensor(answers[index]["prompt_ids"] + answers[index]["response_ids"]) for index in rows]
                ids_RP = pad_sequence(tokens, batch_first=True)
                cache = RaggedCache(len(rows), ids_RP.shape[1], target.device)
                out = target.forward(ids_RP.to(target.device), cache, taps)
                for row, index in enumerate(rows):
                    length, span = (
                        sequences[index].length,
                        slice(sequences[index].start, sequences[index].start + sequences[index].length),
                    )
                    ids[span] = tokens[row].int()
                    for store, tap in zip(tap_files, out.taps, strict=True):
                        store[span] = tap[row, :length]
                    for keys, values, layer in zip(key_files, value_files, layers, strict=True):
                        layer_keys, layer_values = cache.layer(layer)
                        keys[span] = layer_keys[row, :, :length].transpose(0, 1)
                        values[span] = layer_values[row, :, :length].transpose(0, 1)
                    bar.update(length)
            done_file.write_text(str(min(first + CHUNK, len(sequences))))


def _open(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
