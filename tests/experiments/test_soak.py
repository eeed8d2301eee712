"""The soak holds on a sound engine, and notices one that is not."""

import asyncio
import os
from typing import Any

import pytest
from omegaconf import OmegaConf

from dcoco.engine import Engine
from experiments.environment import CONF
from experiments.faults import FAULT, fail_at_random
from experiments.soak import grouped, make_jobs, soak
from experiments.soak_clients import WRONG, WRONG_OVER_HTTP, EngineClient, Job, ServerClient
from tests.models import VOCABULARY, tiny_decoder
from tests.servers import serving


def settings(**changes: Any) -> Any:
    """Of a small soak."""
    small = {"requests": 60, "clients": 4, "burst_every": 10, "burst": 12, "max_num_seqs": 4, "max_waiting": 4}
    small |= {"max_model_len": 100, "longest_prompt": 16, "max_tokens": 8, "repeated_prompts": 3, "repeating": 0.5}
    return OmegaConf.merge(OmegaConf.load(f"{CONF}/soak.yaml"), small, {"fault_rate": 0.05}, changes)


def run(engine: Engine, config: Any) -> dict[str, Any]:
    fail_at_random(engine.target, config.fault_rate)
    return asyncio.run(soak(EngineClient(engine), make_jobs(config, VOCABULARY, list(WRONG)), config))


def small_engine(config: Any) -> Engine:
    decoder = tiny_decoder(eos_ids=[])
    return Engine(decoder, "dcoco", config.max_num_seqs, config.max_model_len, config.max_waiting)


def failed(report: dict[str, Any]) -> list[str]:
    return [name for name, held in report["checks"].items() if not held]


def test_a_sound_engine_holds():
    config = settings()
    report = run(small_engine(config), config)
    assert not failed(report), report["wrongs"]
    assert sum(sum(outcomes.values()) for outcomes in report["outcomes"].values()) == 60
    assert report["outcomes"]["leaves"]["left"] >= 4
    assert report["outcomes"]["broken"].keys() == {"refused"}


def test_a_sound_server_holds():
    """The same over HTTP, where more can be wrong with a request."""
    config = settings(max_body_bytes=100_000)

    async def ask(url: str) -> dict[str, Any]:
        async with ServerClient(url, "tiny", os.getpid(), config.max_body_bytes) as client:
            return await soak(client, make_jobs(config, VOCABULARY, [*WRONG, *WRONG_OVER_HTTP]), config)

    sizes = {name: config[name] for name in ("max_num_seqs", "max_model_len", "max_waiting", "max_body_bytes")}
    with serving(tiny_decoder(eos_ids=[]), **sizes) as server:
        fail_at_random(server.engine.target, config.fault_rate)
        report = asyncio.run(ask(server.url))
    missed = set(failed(report)) - {"the queue was full"}  # the threads take turns as they like
    assert not missed, report["wrongs"]


def test_a_cancel_that_does_nothing_is_noticed(monkeypatch):
    monkeypatch.setattr(Engine, "cancel", lambda self, request: None)
    config = settings(fault_rate=0.0)  # a fault may free the rows
    assert "counters are back at zero" in failed(run(small_engine(config), config))


def test_text_that_changes_is_noticed():
    config = settings(fault_rate=0.0)
    engine, original = small_engine(config), Engine.submit_all
    count = 0

    def another(prompt_ids, params):
        nonlocal count
        count += 1
        return original(engine, [*prompt_ids, 3 + count % 60], params)

    engine.submit_all = another  # type: ignore[method-assign]
    assert "repeated greedy requests got the same text" in failed(run(engine, config))


def test_errors_of_another_cause_are_noticed():
    config = settings()
    engine = small_engine(config)
    fail_at_random(engine.target, 0.0)
    original, count = engine.target.forward_blocks, 0

    def breaks(*args, **kwargs):
        nonlocal count
        count += 1
        if count % 15 == 0:
            raise ValueError("a fault of its own")
        return original(*args, **kwargs)

    engine.target.forward_blocks = breaks  # type: ignore[method-assign]
    report = run(engine, config)
    assert "every request got an answer of the expected kind" in failed(report)
    assert "a fault of its own" in report["wrongs"][0]


def test_jobs_are_seeded_and_of_all_kinds():
    config = settings(requests=300)
    jobs = make_jobs(config, VOCABULARY, list(WRONG))
    assert jobs == make_jobs(config, VOCABULARY, list(WRONG))
    assert jobs != make_jobs(config, VOCABULARY, list(WRONG), seed=1)
    assert len(jobs) == 300
    assert {job.kind for job in jobs} == {"ordinary", "leaves", "broken"}
    assert all(job.kind == "leaves" for job in jobs[-config.clients :])
    early_or_broken = sum(job.kind != "ordinary" for job in jobs)
    assert 0.25 < early_or_broken / len(jobs) < 0.45
    same = [job for job in jobs if job.key is not None]
    assert len({(job.key, tuple(job.prompt), job.params["max_tokens"]) for job in same}) == config.repeated_prompts


@pytest.mark.parametrize("count", [5, 44, 60, 61, 200])
def test_groups_hold_each_job_once(count):
    jobs = [Job("ordinary", [index], {}) for index in range(count)]
    groups = list(grouped(jobs, 10, 12, last=4))
    assert [job for group in groups for job in group] == jobs
    assert {len(group) for group in groups} <= {1, 12}
    assert all(len(group) == 1 for group in groups[-4:])
    assert any(len(group) == 12 for group in groups) == (count >= 26)


def test_faults_are_as_frequent_as_asked():
    target = tiny_decoder().target
    target.forward_blocks = lambda: "fine"  # type: ignore[method-assign, assignment]
    fail_at_random(target, 0.3)
    failures = 0
    for _ in range(400):
        try:
            assert target.forward_blocks() == "fine"
        except RuntimeError as error:
            failures += str(error) == FAULT
    assert 80 < failures < 160
