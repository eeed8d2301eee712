"""Is the output really the target's? dcoco against plain decoding, token for token, on real prompts.

    python -m experiments.identity target=smollm2_135m prompts=200 seeds=50 'rows=[1,8,32]'

Greedy and sampled (rule `match`: the same seed gives the same text). Where a text parts, the float64 gap between
the two tokens is reported: a gap at rounding level is a tie, anything else a fault, and the exit status says
so.
"""

import json
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dcoco import DCOCODecoder, RequestOutput, SamplingParams
from dcoco.decoder import Method
from dcoco.targets import load_target
from experiments.benchmarks import load_benchmark
from experiments.environment import CONF, describe
from verifier.sampling import Stream, exponential_noise

TIE = 1e-3  # logits in float32 through 30 layers agree to about 1e-4


@hydra.main(version_base=None, config_path=CONF, config_name="identity")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    names = list(config.benchmark)
    share = -(-config.prompts // len(names))
    texts = [item.turns[0] for name in names for item in load_benchmark(name, config.benchmark_dir, share)]
    decoder = DCOCODecoder.from_pretrained(
        config.target,
        config.drafter,
        device=config.device,
        dtype=config.dtype,
        max_rows=max(config.plain_rows, *config.rows),
    )
    asked_of = [decoder.asked([{"role": "user", "content": text}]) for text in texts[: config.prompts]]
    prompts = [decoder.encode(prompt) for prompt in asked_of]
    greedy = [SamplingParams(max_tokens=config.max_tokens)] * len(prompts)
    sampled = [
        SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed)
        for seed in range(config.seeds)
    ]
    rounds = {"greedy": (prompts, greedy), "sampled": ((prompts * config.seeds)[:: max(1, len(prompts) // 7)], sampled)}
    report: dict[str, Any] = {"config": OmegaConf.to_container(config), **describe()}
    faults = 0
    for name, (asked, params) in rounds.items():
        asked = asked[: len(params)]
        plain = decode(decoder, asked, params, "plain", config.plain_rows, name)
        report[name] = {"of": len(plain), "tokens": sum(len(output.token_ids) for output in plain)}
        for rows in config.rows:
            drafted = decode(decoder, asked, params, "dcoco", rows, name)
            pairs = list(zip(params, plain, drafted, strict=True))
            found = [difference(config, *pair) for pair in pairs if pair[1].token_ids != pair[2].token_ids]
            faults += sum(item["gap"] is None or item["gap"] > TIE for item in found)
            rounds_run = sum(output.stats.rounds for output in drafted)
            length = sum(output.stats.committed_tokens for output in drafted) / max(1, rounds_run)
            report[name][f"in batches of {rows}"] = {
                "identical": len(pairs) - len(found),
                "mean_acceptance_length": length,
                "differences": found,
            }
            print(
                f"{name}, in batches of {rows}: {len(pairs) - len(found)} of {len(pairs)} identical, "
                f"acceptance length {length:.2f}",
                *found,
                sep="\n",
            )
    (Path(HydraConfig.get().runtime.output_dir) / "identity.json").write_text(json.dumps(report, indent=1))
    sys.exit(1 if faults else 0)


def decode(
    decoder: DCOCODecoder, asked: Any, params: list[SamplingParams], method: Method, rows: int, name: str
) -> list[RequestOutput]:
    """Answers to all prompts, `rows` of them at once."""
    done: list[RequestOutput] = []
    for start in tqdm(range(0, len(asked), rows), desc=f"{name}, {method}, {rows} at once", unit="batch"):
        part = slice(start, start + rows)
        done += decoder.generate(asked[part], params[part], method)
    return done


def difference(
    config: DictConfig, params: SamplingParams, plain: RequestOutput, other: RequestOutput
) -> dict[str, Any]:
    """Where two answers part, and in float64 how far apart the two tokens are there in what decides between them: the
    logits or, above temperature 0, the race of exponential clocks (None: one answer ended before the other)."""
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    if index is None:
        return {"at": min(len(plain.token_ids), len(other.token_ids)), "gap": None}
    model, _, _ = load_target(config.target, dtype="float64", device=config.device)
    ids = torch.tensor([plain.prompt_token_ids + plain.token_ids[:index]])
    tokens = torch.tensor([[[plain.token_ids[index], other.token_ids[index]]]])
    with torch.inference_mode():
        score = model(input_ids=ids.to(model.device)).logits[0, -1].cpu()[tokens[0, 0]]
        if params.temperature:
            seed, position = torch.tensor([params.seed]), torch.tensor([[ids.shape[1]]])
            noise = exponential_noise(seed, position, Stream.TARGET, tokens)[0, 0]
            score = score / params.temperature - noise.double().log()
    return {"at": index, "tokens": tokens.flatten().tolist(), "gap": abs(float(score[0] - score[1]))}


if __name__ == "__main__":
    main()
