"""What answers prompts, to be measured side by side: our methods, transformers' `generate`, llama.cpp.

All take token ids and give `RequestOutput`s whose `stats` hold what can be known of a system from outside: its seconds,
its passes and what they committed. A batch takes as long as the slowest of its answers.
"""

import json
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console

from dcoco import DCOCODecoder, RequestOutput, SamplingParams, Stats
from dcoco.decoder import Method
from dcoco.errors import ConfigError, EngineError
from dcoco.registry import load_corrector
from dcoco.targets import drafter_folder, resolve_drafter
from drafters.registry import load_drafter
from experiments.benchmarks import load_benchmark

T = TypeVar("T")

WORKER = Path(__file__).with_name("llamacpp_worker.py")


class System(Protocol):
    """Something that answers prompts."""

    @property
    def name(self) -> str: ...

    def serves(self, temperature: float, batch: int) -> bool:
        """Whether it can do this, and whether it is worth a measurement of its own."""

    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """Answer prompts side by side; temperature and `max_tokens` of all are the first one's."""


def rotated(systems: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: each begins with another one, so that none is always first after a pause."""
    first = turn % len(systems)
    return [*systems[first:], *systems[:first]]


def first_turns(
    decoder: DCOCODecoder, benchmarks: Sequence[str], directory: str | None, limit: int | None
) -> dict[str, list[list[int]]]:
    """Token ids of the first turns of benchmarks, as the target is asked."""
    return {
        name: [
            decoder.encode(decoder.asked([{"role": "user", "content": item.turns[0]}]))
            for item in load_benchmark(name, directory, limit)
        ]
        for name in benchmarks
    }


def load_decoders(
    entries: Sequence[Any], base: DCOCODecoder, skip_missing: bool, **options: Any
) -> list[tuple[Any, DCOCODecoder]]:
    """Each configured system with its decoder, all on the base's target; drafters are loaded once.

    `options` are the decoders'; a system's own `rule` and `recall` go before them.

    Raises ConfigError for a system whose drafter isn't there; with `skip_missing` it is left out.
    """
    loaded: dict[str | None, tuple[Any, Any]] = {None: (None, None)}
    found = []
    for entry in entries:
        name = entry.get("drafter")
        if name not in loaded:
            try:
                folder = drafter_folder(resolve_drafter(name))
                if not (folder / "config.json").is_file():
                    raise ConfigError(f"{folder} holds no checkpoint")
            except ConfigError as error:
                if not skip_missing:
                    raise ConfigError(f"system {entry.name!r}: {error}; or set skip_missing=true") from error
                Console().print(f"without {entry.name}: {error}", markup=False)
                continue
            loaded[name] = load_drafter(folder, base.target, base.tokenizer), load_corrector(folder, base.target)
        each = options | {key: entry[key] for key in ("rule", "recall") if key in entry}
        decoder = DCOCODecoder(base.target, base.tokenizer, *loaded[name], list(base.eos_ids), **each)
        found.append((entry, decoder))
    return found


@dataclass
class Ours:
    """A method of ours with any drafter behind the protocol."""

    name: str
    decoder: DCOCODecoder
    method: Method
    trace: bool = False

    def serves(self, temperature: float, batch: int) -> bool:
        """At temperature 0 all rules decide alike: one of them is enough."""
        return temperature > 0 or self.decoder.rule == "match"

    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        return self.decoder.generate(prompts, params, self.method, trace=self.trace)


class Transformers:
    """transformers' own `generate` on the same weights and dtype: what a user would run without us.

    Args:
        model: not the one that a `Target` has packed and hooked.
        eos_ids: tokens that end an answer.
        lookup: `prompt_lookup_num_tokens`, drafting from the prompt (Saxena 2023); None: plain decoding.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, eos_ids: Collection[int], lookup: int | None = None):
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = set(eos_ids)
        self.lookup = lookup

    def serves(self, temperature: float, batch: int) -> bool:
        """Assisted generation takes one prompt at a time."""
        return self.lookup is None or batch == 1

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """Sampled text differs from ours, as its random numbers do."""
        longest, first = max(map(len, prompts)), params[0]
        pad = next(iter(self.eos_ids), 0)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        sample = {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        torch.manual_seed(first.seed or 0)
        passes: list[float] = []  # when each ended
        hook = self.model.register_forward_hook(lambda *_: passes.append(time.perf_counter()))
        begun = time.perf_counter()
        try:
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=first.max_tokens,
                prompt_lookup_num_tokens=self.lookup,
                repetition_penalty=1.0,  # whatever the model's generation config says
                eos_token_id=list(self.eos_ids) or None,
                pad_token_id=pad,
                **(sample if first.temperature else {"do_sample": False}),
            )
        finally:
            hook.remove()
        seconds = time.perf_counter() - begun
        outputs = []
        for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
            new = self._cut(row)
            stats = Stats(
                rounds=min(len(passes), len(new)) - 1,
                committed_tokens=len(new) - 1,
                seconds=seconds,
                prefill_seconds=passes[0] - begun,
            )
            outputs.append(_output(prompt, new, self.tokenizer, self.eos_ids, stats))
        return outputs

    def _cut(self, row: list[int]) -> list[int]:
        """Up to the token that ends the answer: the rest of a row is padding."""
        end = next((index for index, token in enumerate(row) if token in self.eos_ids), len(row) - 1)
        return row[: end + 1]


class LlamaCpp:
    """llama.cpp with 4-bit weights, in a process of its own (`llamacpp_worker.py` says what it does).

    It rounds activations to 8 bits, so texts part from ours even where the weights are the same; the speed is what
    compares.

    Args:
        python: the interpreter of an environment that has the package llama-cpp-python.
        gguf: the weights.
        max_length: tokens of a prompt and its answer.
        batch: prompts at once.
    """

    def __init__(
        self, name: str, python: Path, gguf: Path, tokenizer: Any, eos_ids: Collection[int], max_length: int, batch: int
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        sizes = [max_length, batch, torch.get_num_threads()]
        self.process = subprocess.Popen(
            [str(part) for part in (python, WORKER, gguf, *sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def serves(self, temperature: float, batch: int) -> bool:
        return True

    def answer(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        first = params[0]
        asked = {
            "prompts": prompts,
            "max_tokens": first.max_tokens,
            "temperature": first.temperature,
            "seed": first.seed or 0,
            "eos": self.eos_ids,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"the llama.cpp process ended with status {self.process.wait()}; its errors stand above")
        found = json.loads(line)
        outputs = []
        for prompt, new in zip(prompts, found["tokens"], strict=True):
            rounds = len(new) - 1
            stats = Stats(rounds, 0, 0, rounds, seconds=found["seconds"], prefill_seconds=found["prefill_seconds"])
            outputs.append(_output(prompt, new, self.tokenizer, self.eos_ids, stats))
        return outputs

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _output(prompt: list[int], new: list[int], tokenizer: Any, eos_ids: Collection[int], stats: Stats) -> RequestOutput:
    text = tokenizer.decode(new, skip_special_tokens=True)
    return RequestOutput(prompt, new, text, "stop" if new[-1] in eos_ids else "length", stats)
