"""Thousands of requests of all kinds, many cancelled or broken, while passes of the model fail: does anything get lost?

    python -m experiments.soak target=smollm2_135m requests=5000
    python -m experiments.soak target=smollm2_135m requests=500 engine=inprocess

Lengths and parameters are mixed; a third of the clients go away early or ask for what can't be had; now and then more
come at once than may wait; passes fail at random; at the very end the server is told to stop in the middle of its work.
The run's folder gets `soak.json` and `soak.png`; the exit status says whether every check held.
"""

import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from tqdm import tqdm

from dcoco import DCOCODecoder
from dcoco.engine import Engine
from dcoco.errors import ConfigError
from dcoco.targets import load_target
from experiments.environment import CONF, describe
from experiments.faults import fail_at_random
from experiments.servers import Server
from experiments.soak_clients import WRONG, WRONG_OVER_HTTP, Client, EngineClient, Job, ServerClient

GROWTH = 0.03  # of resident memory, from the first tenth of the requests to the end
MOST_ANSWERS = 2  # to one request
TENTH = 10
SECONDS_TO_FREE = 5.0  # for the rows of clients that have gone; an answer to one of them would take far longer


@dataclass
class Sample:
    """What a moment looked like."""

    seconds: float
    requests: int  # that have been answered, refused, ...
    memory: int | None  # bytes
    running: int
    waiting: int


@dataclass
class Soak:
    """One soak on its way: puts jobs on a client, and holds every outcome against what was to be expected."""

    client: Client
    clients: int
    interval: float = 1.0  # seconds between samples
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)  # outcomes that should not be
    samples: list[Sample] = field(default_factory=list)
    first_texts: dict[str, str] = field(default_factory=dict)
    repeated: int = 0
    different: int = 0
    finished: int = 0
    _crowds: int = 0  # bursts on their way
    _start: float = field(default_factory=time.perf_counter)

    async def run(self, groups: Iterator[list[Job]], total: int) -> None:
        """All jobs: `clients` groups at a time, the jobs of a group at once."""
        with tqdm(total=total, unit="request") as bar:
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.gather(*(self._work(groups, total, bar) for _ in range(self.clients)))
            finally:
                watch.cancel()

    async def settle(self, job: Job, expected: set[str]) -> None:
        """One job, to its end."""
        outcome, detail = await self.client.ask(job)
        self.outcomes[job.kind, outcome] += 1
        if outcome not in (expected | {"busy"} if self._crowds else expected):
            self.wrongs.append(f"{job.kind} {job.wrong or ''}: {outcome}: {detail}"[:500])
        if job.key is not None and outcome == "answered":
            first = self.first_texts.setdefault(job.key, detail)
            self.repeated += 1
            self.different += first != detail

    async def sample(self) -> None:
        """Note how things stand."""
        running, waiting = await self.client.load()
        at = time.perf_counter() - self._start
        self.samples.append(Sample(at, self.finished, self.client.memory(), running, waiting))

    async def idle(self) -> bool:
        """Whether the counters are back at zero, soon after the last client has gone."""
        deadline = time.monotonic() + (SECONDS_TO_FREE if self.client.remote else 0.0)
        while True:
            await self.sample()
            if self.samples[-1].running == self.samples[-1].waiting == 0:
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)

    async def _work(self, groups: Iterator[list[Job]], total: int, bar: Any) -> None:
        for group in groups:  # all workers take from the same one
            crowd = len(group) > 1
            self._crowds += crowd
            await asyncio.gather(*(self.settle(job, EXPECTED[job.kind]) for job in group))
            self._crowds -= crowd
            before, self.finished = self.finished, self.finished + len(group)
            bar.update(len(group))
            if before < total // TENTH <= self.finished:
                await self.sample()

    async def _watch(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self.interval)

    def growth(self, total: int) -> float | None:
        """By what share resident memory has grown since the first tenth of the requests."""
        later = [s.memory for s in self.samples if s.requests >= total // TENTH and s.memory is not None]
        few = max(1, min(5, len(later) // 4))  # a moment may be a peak
        return statistics.median(later[-few:]) / statistics.median(later[:few]) - 1.0 if later else None

    def checks(self, total: int, idle: bool) -> dict[str, bool]:
        """What must hold."""
        growth = self.growth(total)
        return {
            "every request got an answer of the expected kind": not self.wrongs,
            "none is missing": sum(self.outcomes.values()) == total,
            "counters are back at zero": idle,
            f"memory has grown by less than {GROWTH:.0%}": growth is None or growth < GROWTH,
            "repeated greedy requests got the same text": self.repeated > len(self.first_texts) and not self.different,
            "the queue was full": any(outcome == "busy" for _, outcome in self.outcomes),
            "passes failed": any(outcome == "failed" for _, outcome in self.outcomes),
        }


# "failed" is an answer that names the injected fault. A client that leaves may have been answered just before.
EXPECTED = {
    "ordinary": {"answered", "failed"},
    "leaves": {"left", "answered", "failed"},
    "broken": {"refused"},
    "interrupted": {"answered", "failed", "stopped"},
}


def make_jobs(config: Any, vocabulary: int, wrongs: Sequence[str], seed: int = 0) -> list[Job]:
    """All requests of a soak. The last ones leave: what they asked for must not go on without them."""
    chance = random.Random(seed)
    jobs = []
    for _ in range(config.requests - config.clients):
        draw = chance.random()
        kind = "leaves" if draw < config.leaving else "broken" if draw < config.leaving + config.broken else "ordinary"
        jobs.append(make_job(kind, config, vocabulary, wrongs, chance))
    return jobs + [make_job("leaves", config, vocabulary, wrongs, chance) for _ in range(config.clients)]


def make_job(kind: str, config: Any, vocabulary: int, wrongs: Sequence[str], chance: random.Random) -> Job:
    """One request of a kind: ordinary, leaves, broken or interrupted."""
    # Most prompts are short: lengths spread evenly over orders of magnitude.
    length = int(math.exp(chance.uniform(0.0, math.log(config.longest_prompt))))
    params: dict[str, Any] = {"max_tokens": chance.randint(1, config.max_tokens), "temperature": 0.0}
    if kind == "ordinary" and chance.random() < config.repeating:
        number = chance.randrange(config.repeated_prompts)
        again = random.Random(number)
        prompt = [again.randrange(vocabulary) for _ in range(1 + number % config.longest_prompt)]
        params["max_tokens"] = config.max_tokens
        return Job(kind, prompt, params, chance.random() < 0.5, key=str(number))
    prompt = [chance.randrange(vocabulary) for _ in range(length)]
    maybe: dict[str, Any] = {
        "temperature": chance.choice([0.3, 0.8, 1.5]),
        "top_p": 0.9,
        "top_k": 20,
        "seed": chance.randrange(1 << 40),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["e", " the"],
        "logit_bias": {chance.randrange(vocabulary): 2.0},
        "logprobs": chance.randint(0, 5),
        "min_tokens": 1,
        "n": MOST_ANSWERS,
    }
    params |= {name: value for name, value in maybe.items() if chance.random() < 0.25}
    job = Job(kind, prompt, params, chance.random() < 0.5)
    if kind in ("leaves", "interrupted"):  # goes on for long unless somebody ends it
        endless = {"max_tokens": config.max_model_len, "ignore_eos": True, "temperature": 0.8}
        patience = chance.choice([0, 1, 3]) if kind == "leaves" else None
        return replace(job, params=endless, stream=kind == "interrupted" or job.stream, patience=patience)
    if kind == "broken":
        return replace(job, wrong=chance.choice(list(wrongs)))
    return job


def grouped(jobs: Sequence[Job], every: int, burst: int, last: int) -> Iterator[list[Job]]:
    """The jobs one by one, and after each `every` of them `burst` ones that come together; the `last` come alone."""
    jobs = list(jobs)
    while jobs:
        for job in jobs[:every]:
            yield [job]
        jobs = jobs[every:]
        if len(jobs) >= burst + last:
            yield jobs[:burst]
            jobs = jobs[burst:]


@hydra.main(version_base=None, config_path=CONF, config_name="soak")
def main(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    if config.engine not in ("http", "inprocess"):
        raise ConfigError(f"engine={config.engine!r}: must be http or inprocess")
    if config.clients * MOST_ANSWERS > config.max_num_seqs + config.max_waiting:
        raise ConfigError(f"clients={config.clients} fill the queue all the time: raise max_waiting, or have fewer")
    folder = Path(HydraConfig.get().runtime.output_dir)
    report = asyncio.run(over_http(config, folder) if config.engine == "http" else in_process(config))
    (folder / "soak.json").write_text(json.dumps(report, indent=1))
    plot(report["samples"], folder / "soak.png")
    console = Console()
    for name, held in report["checks"].items():
        console.print(f"{'held  ' if held else 'FAILED'}  {name}", style=None if held else "red")
    for wrong in report["wrongs"][:20]:
        console.print(wrong, style="red", markup=False)
    console.print(f"results in {folder / 'soak.json'}")
    sys.exit(0 if all(report["checks"].values()) else 1)


async def in_process(config: DictConfig) -> dict[str, Any]:
    """The soak on an engine in this process."""
    decoder = DCOCODecoder.from_pretrained(
        config.target, config.drafter, device=config.device, dtype=config.dtype, max_rows=config.max_num_seqs
    )
    engine = Engine(decoder, config.method, config.max_num_seqs, config.max_model_len, config.max_waiting)
    fail_at_random(engine.target, config.fault_rate, config.seed)
    jobs = make_jobs(config, decoder.target.vocab_size, list(WRONG), config.seed)
    return await soak(EngineClient(engine), jobs, config)


async def over_http(config: DictConfig, folder: Path) -> dict[str, Any]:
    """The soak on a server, and its end."""
    vocabulary = load_vocabulary(config)
    server = Server(faulty_server(config), folder / "server.log")
    try:
        server.wait()
        async with ServerClient(server.url, server.model(), server.process.pid, config.max_body_bytes) as client:
            jobs = make_jobs(config, vocabulary, [*WRONG, *WRONG_OVER_HTTP], config.seed)
            report = await soak(client, jobs, config)
            report["checks"] |= await interrupt(client, server, config, vocabulary, report)
    finally:
        server.stop()
    return report


async def soak(client: Client, jobs: Sequence[Job], config: Any) -> dict[str, Any]:
    """Put all jobs on a client; returns the report."""
    task = Soak(client, config.clients, config.interval)
    begun = time.perf_counter()
    await task.run(grouped(jobs, config.burst_every, config.burst, config.clients), len(jobs))
    idle = await task.idle()
    kinds: dict[str, dict[str, int]] = {}
    for (kind, outcome), count in sorted(task.outcomes.items()):
        kinds.setdefault(kind, {})[outcome] = count
    return {
        "checks": task.checks(len(jobs), idle),
        "seconds": time.perf_counter() - begun,
        "requests": len(jobs),
        "outcomes": kinds,
        "repeated": task.repeated,
        "repeated_prompts": len(task.first_texts),
        "memory_growth": task.growth(len(jobs)),
        "wrongs": task.wrongs,
        "samples": [vars(sample) for sample in task.samples],
        "config": OmegaConf.to_container(config) if OmegaConf.is_config(config) else vars(config),
        **describe(),
    }


async def interrupt(
    client: "ServerClient", server: Server, config: DictConfig, vocabulary: int, report: dict[str, Any]
) -> dict[str, bool]:
    """Tell the server to stop while it is busy: every request that it has taken gets an answer or an error."""
    chance = random.Random(config.seed)
    task = Soak(client, config.clients)
    jobs = [make_job("interrupted", config, vocabulary, [], chance) for _ in range(config.clients)]
    asked = asyncio.gather(*(task.settle(job, EXPECTED[job.kind]) for job in jobs))
    while sum(await client.load()) < len(jobs) and not asked.done():
        await asyncio.sleep(0.1)
    status = await asyncio.to_thread(server.stop)
    await asked
    report["outcomes"]["interrupted"] = {outcome: count for (_, outcome), count in sorted(task.outcomes.items())}
    report["wrongs"] += task.wrongs
    return {"a server that is told to stop answers what it has taken": not task.wrongs, "and ends well": status == 0}


def faulty_server(config: DictConfig) -> list[Any]:
    """The command that serves with injected faults."""
    names = ["target", "drafter", "dtype", "device", "threads", "method", "max_num_seqs", "max_model_len"]
    names += ["max_waiting", "max_body_bytes", "fault_rate", "seed"]
    given = {name: config[name] for name in names if config[name] is not None}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    return [sys.executable, "-m", "experiments.faults", *options]


def load_vocabulary(config: DictConfig) -> int:
    """How many tokens the target knows."""
    return load_target(config.target, dtype=config.dtype, device="cpu")[0].get_output_embeddings().weight.shape[0]


def plot(samples: Sequence[dict[str, Any]], file: Path) -> None:
    """Resident memory, and requests running and waiting, over time."""
    try:
        from matplotlib import pyplot
    except ImportError:
        Console().print("no plot: pip install 'dcoco[plots]'")
        return
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    seconds = [sample["seconds"] for sample in samples]
    upper.plot(seconds, [(sample["memory"] or 0) / 2**20 for sample in samples])
    upper.set(ylabel="resident memory, MiB")
    for name in ("running", "waiting"):
        lower.plot(seconds, [sample[name] for sample in samples], label=name)
    lower.set(xlabel="seconds", ylabel="requests")
    lower.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
