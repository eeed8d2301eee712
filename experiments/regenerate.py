"""Let the target answer the training prompts: drafters learn from its own text.

    python -m experiments.regenerate target=smollm2_135m prompts=../shared/data/prompts out=answers.jsonl

The prompts are shuffled once (by `seed`) and answered in batches with the engine; a run that was stopped goes on behind
the last line it wrote.
"""

import json
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from dcoco import DCOCODecoder, SamplingParams
from dcoco.decoder import NO_DRAFTER
from dcoco.errors import ConfigError
from experiments.environment import CONF


@hydra.main(version_base=None, config_path=CONF, config_name="regenerate")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    prompts = read_prompts(Path(config.prompts), config.seed)[: config.limit]
    decoder = DCOCODecoder.from_pretrained(
        config.target,
        drafter=NO_DRAFTER if config.method == "plain" else config.drafter,
        device=config.device,
        dtype=config.dtype,
        max_rows=config.rows,
    )
    out = Path(config.out)
    done = whole_lines(out)
    with out.open("a") as file, tqdm(total=len(prompts), initial=done, unit="prompt") as bar:
        for start in range(done, len(prompts), 4 * config.rows):
            texts = prompts[start : start + 4 * config.rows]
            encoded = [decoder.encode(decoder.asked([{"role": "user", "content": text}])) for text in texts]
            chosen = [index for index, ids in enumerate(encoded) if len(ids) <= config.max_prompt]
            params = [
                SamplingParams(
                    max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed + start + index
                )
                for index in chosen
            ]
            outputs = decoder.generate([encoded[index] for index in chosen], params, config.method)
            answers = dict(zip(chosen, outputs, strict=True))
            for index, ids in enumerate(encoded):
                answer = answers[index].token_ids if index in answers else []  # an empty answer marks a skipped prompt
                file.write(json.dumps({"prompt_ids": ids if answer else [], "response_ids": answer}) + "\n")
            file.flush()
            bar.update(len(texts))


def read_prompts(path: Path, seed: int) -> list[str]:
    """All prompts of a JSON-lines file or of a folder of them, shuffled."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"prompts={path}: no JSON-lines file there; name a file, or a folder of *.jsonl")
    lines = [json.loads(line) for file in files for line in file.open()]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
    return [lines[index]["prompt"] for index in order]


def whole_lines(file: Path) -> int:
    """How many lines a file holds; a line that was cut off by an interruption is removed."""
    if not file.exists():
        return 0
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    return whole.count(b"\n")


if __name__ == "__main__":
    main()
