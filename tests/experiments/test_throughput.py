"""What the load does, and what is counted: on a clock that only the tests move where times matter."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dcoco import SamplingParams
from dcoco.engine import Engine
from dcoco.errors import ConfigError
from dcoco.output import Stats
from experiments import load as load_module
from experiments import throughput
from experiments.environment import CONF
from experiments.load import Load, Timeline, drive, drive_server, pieces_of
from experiments.metrics import Pass, figures, spread, steady
from experiments.records import Records
from experiments.throughput import InProcess, cells, fixed, prompts_of_a_pass, read, run, schedule
from tests.models import prompts, tiny_decoder
from tests.servers import serving

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Watched(Engine):
    """An engine that notes what it is asked, and how many requests it has in each step."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.submitted: list[Any] = []
        self.in_flight: list[int] = []

    def submit(self, prompt_ids, params):
        self.submitted.append(super().submit(prompt_ids, params))
        return self.submitted[-1]

    def step(self):
        self.in_flight.append(self.running + len(self.waiting))
        return super().step()


class Clock:
    """Stands still but for sleeping and, where told, a while at each look."""

    def __init__(self, tick: float = 0.0):
        self.now = 0.0
        self.tick = tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(load_module, "time", clock)
    yield clock


@pytest.mark.parametrize("method", ["plain", "dcoco"])
def test_a_closed_loop_stays_full_and_asks_each_prompt_once(method):
    engine = Watched(tiny_decoder(), method, 8, 60)
    asked = prompts(11, seed=3)
    timelines = drive(engine, asked, PARAMS, Load(concurrency=4))
    assert [request.prompt_ids for request in engine.submitted] == asked
    ended = sum(count < 4 for count in engine.in_flight)
    assert max(engine.in_flight) == 4
    assert set(engine.in_flight[: len(engine.in_flight) - ended]) == {4}  # full until nothing is left to begin
    assert engine.in_flight[-1] >= 1
    assert not engine.busy
    assert [t.input_tokens for t in timelines] == [len(ids) for ids in asked]
    for timeline, request in zip(timelines, engine.submitted, strict=True):
        assert timeline.output_tokens == len(request.token_ids) == 12
        assert timeline.begun <= timeline.pieces[0][0] <= timeline.pieces[-1][0] == timeline.ended
        assert timeline.stats is not None and timeline.stats["rounds"] == request.stats.rounds


def test_a_server_gets_the_same_requests_and_gives_the_same_tokens():
    asked, load = prompts(7, seed=3), Load(concurrency=3)
    with serving(tiny_decoder(), max_num_seqs=3, max_model_len=60) as server:
        there = asyncio.run(drive_server(server.url, "tiny", asked, PARAMS, load))
        missing = asyncio.run(drive_server(server.url, "another", asked[:1], PARAMS, load))
    here = drive(Engine(tiny_decoder(), "dcoco", 3, 60), asked, PARAMS, load)
    assert [(t.input_tokens, t.output_tokens, t.error) for t in there] == [(len(ids), 12, None) for ids in asked]
    for one, other in zip(there, here, strict=True):
        assert one.stats is not None and other.stats is not None
        assert one.stats["committed_tokens"] == other.stats["committed_tokens"] == 11
        assert one.begun <= one.pieces[0][0] <= one.pieces[-1][0] <= one.ended
    assert figures([Pass("dcoco", load, 0, there)])["completed"] == 7
    assert "status 404" in str(missing[0].error)


def test_a_failed_request_is_counted_as_such():
    engine = Engine(tiny_decoder(), "plain", 2, 60)
    forward, calls = engine.target.forward_blocks, []

    def breaks_once(*args, **kwargs):
        calls.append(0)
        if len(calls) == 5:
            raise RuntimeError("out of luck")
        return forward(*args, **kwargs)

    engine.target.forward_blocks = breaks_once  # type: ignore[method-assign]
    timelines = drive(engine, prompts(6, seed=3), PARAMS, Load(concurrency=2))
    of = figures([Pass("plain", Load(2), 0, timelines)])
    assert of["failed"] == sum(t.error is not None for t in timelines) in (1, 2)
    assert of["completed"] == 6 - of["failed"]
    assert of["total_output_tokens"] == 12 * of["completed"]


def test_arrivals_are_seeded_and_as_frequent_as_asked():
    times = Load(rate=4.0).arrivals(2000, seed=5)
    assert times == Load(rate=4.0).arrivals(2000, seed=5) != Load(rate=4.0).arrivals(2000, seed=6)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)
    assert Load(concurrency=3).arrivals(3) == [0.0] * 3


def test_an_open_loop_asks_when_requests_come(clock):
    """The clock stands still while the engine works: each request is alone, and begins at its own time."""
    engine = Watched(tiny_decoder(), "plain", 4, 60)
    timelines = drive(engine, prompts(5, seed=4), PARAMS, Load(rate=2.0), seed=9)
    assert [t.begun for t in timelines] == pytest.approx(Load(rate=2.0).arrivals(5, seed=9))
    assert max(engine.in_flight) == 1


def test_a_request_that_comes_during_a_step_has_waited(monkeypatch):
    monkeypatch.setattr(load_module, "time", Clock(tick=0.5))
    due = Load(rate=2.0).arrivals(5, seed=9)
    timelines = drive(Watched(tiny_decoder(), "plain", 4, 60), prompts(5, seed=4), PARAMS, Load(rate=2.0), seed=9)
    assert [t.begun for t in timelines] == due


def test_figures_by_hand():
    timelines = [
        Timeline(10, 0.0, 4.0, [(1.0, 1), (2.0, 3), (4.0, 1)]),
        Timeline(20, 1.0, 3.0, [(3.0, 1)]),
        Timeline(30, 2.0, 5.0, [(2.5, 1)], error="lost"),
    ]
    of = figures([Pass("plain", Load(2), 0, timelines)])
    assert (of["duration"], of["completed"], of["failed"]) == (5.0, 2, 1)
    assert (of["total_input_tokens"], of["total_output_tokens"]) == (30, 6)
    assert of["request_throughput"] == pytest.approx(2 / 5)
    assert of["output_throughput"] == pytest.approx(6 / 5)
    assert of["total_token_throughput"] == pytest.approx(36 / 5)
    assert (of["mean_ttft_ms"], of["median_ttft_ms"]) == (1500, 1500)
    assert of["p99_ttft_ms"] == pytest.approx(1990)
    assert of["mean_tpot_ms"] == pytest.approx(750)  # of the first one only: (4 - 1) / 4
    assert of["mean_itl_ms"] == pytest.approx(1500)
    assert of["mean_e2el_ms"] == pytest.approx(3000)


def test_drafting_is_told_as_stats_define_it():
    deep, shallow = Stats(), Stats()
    for drafted, accepted in ((3, 3), (3, 2), (6, 1), (0, 0)):
        deep.count(drafted, 3, accepted, accepted + 1, {})
        shallow.count(0, 0, 0, 1, {})
    timelines = [Timeline(1, 0.0, 1.0, [(1.0, 10)], asdict(one)) for one in (deep, shallow)]
    of = figures([Pass("dcoco", Load(2), 0, timelines)])
    assert of["spec_decode_num_drafts"] == 3
    assert (of["spec_decode_draft_tokens"], of["spec_decode_accepted_tokens"]) == (12, 6)
    assert of["spec_decode_acceptance_rate"] == 50.0
    assert of["spec_decode_acceptance_length"] == pytest.approx(14 / 8)
    assert of["spec_decode_per_position_acceptance_rates"] == [3 / 8, 2 / 8, 1 / 8]


def test_percentiles():
    values = np.random.default_rng(0).random(101)
    of = spread("itl", values)
    assert of["p99_itl_ms"] == pytest.approx(1000 * sorted(values)[99])
    assert of["median_itl_ms"] == pytest.approx(1000 * sorted(values)[50])
    assert of["mean_itl_ms"] == pytest.approx(1000 * values.mean())
    assert set(spread("itl", []).values()) == {None}


def test_the_steady_part_of_waves():
    """Two at a time, in step, three waves: the first one warms up, and the other two count in full."""
    waves = [Timeline(1, begun, begun + 10, [(begun + 5, 1), (begun + 10, 7)]) for begun in (0.0, 10.0, 20.0)]
    assert steady([one for wave in waves for one in (wave, wave)], 2) == (32, 20.0)
    assert steady(waves, 1) == (16, 20.0)
    assert steady(waves, 3) == (0, 0.0)
    assert steady(waves, None) == (0, 0.0)


def test_the_steady_part_ends_when_nothing_is_left_to_begin():
    ends = [3.0, 5.0, 8.0, 9.0]
    timelines = [Timeline(1, 0.0, end, [(end - 1, 1), (end, 1)]) for end in ends]
    assert steady(timelines, 2) == (5, 5.0)  # after 3.0, to 8.0


def test_tokens_of_pieces():
    assert pieces_of(6, [1, 4, 6], [0, 0, 0]) == [1, 3, 2]
    assert pieces_of(8, [None, None, None], [2, 4, 2]) == [2, 4, 2]
    assert pieces_of(3, [None, 3], [0, 0]) == [0, 3]
    assert pieces_of(0, [], []) == []


def test_methods_take_turns():
    names = [SimpleNamespace(name=name) for name in "abc"]
    order = [(system.name, load.concurrency, repeat) for system, load, repeat in schedule(names, [Load(1), Load(4)], 2)]
    first = [("a", 1, 0), ("b", 1, 0), ("c", 1, 0), ("b", 1, 1), ("c", 1, 1), ("a", 1, 1)]
    assert order == [*first, *((name, 4, repeat) for name, _, repeat in first)]


def test_prompts_of_a_pass():
    assert [prompts_of_a_pass(Load(number), None) for number in (1, 4, 32)] == [12, 12, 96]
    assert [prompts_of_a_pass(Load(rate=rate), None) for rate in (0.1, 2.0)] == [12, 60]
    assert prompts_of_a_pass(Load(32), 7) == 7


def test_a_fixed_length_is_what_is_verified():
    decoder = tiny_decoder(eos_ids=[])
    timelines = drive(Engine(fixed(decoder, 3), "dcoco", 2, 60), prompts(4, seed=8), PARAMS, Load(concurrency=2))
    assert all(t.stats is not None and max(1, len(t.stats["accepted_at"])) <= 3 for t in timelines)
    drafted = sum(t.stats["draft_tokens"] for t in timelines if t.stats is not None)
    rounds = sum(t.stats["rounds"] for t in timelines if t.stats is not None)
    assert 2.0 < drafted / rounds <= 3.0  # fewer only at the end of an answer
    assert decoder.tree_size == 23 and decoder.worth == 0.08


def settings(**changes: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(f"{CONF}/throughput.yaml"), {"max_tokens": 6, "repeats": 2}, changes)


def systems(names: list[str], ran: list[str]) -> list[Any]:
    decoder = tiny_decoder(eos_ids=[])

    class Noted(InProcess):
        def run(self, *arguments):
            ran.append(self.name)
            return super().run(*arguments)

    return [Noted(name, decoder, name, 4, 60, SamplingParams(max_tokens=2)) for name in names]


def test_a_run_goes_on_where_it_stopped(tmp_path):
    loads, asked = [Load(concurrency=2), Load(rate=1000.0)], prompts(10, seed=2)
    counts = dict.fromkeys(loads, 5)
    ran: list[str] = []
    run(systems(["plain"], ran), loads, counts, asked, settings(), tmp_path)
    assert ran == ["plain"] * 4
    lines = (tmp_path / "passes.jsonl").read_text().splitlines()
    (tmp_path / "passes.jsonl").write_text("\n".join(lines[:3]) + "\n")  # stopped before the last one
    ran.clear()
    passes = run(systems(["plain", "dcoco"], ran), loads, counts, asked, settings(), tmp_path)
    assert ran == ["dcoco", "dcoco", "dcoco", "dcoco", "plain"]
    assert read(Records(tmp_path / "passes.jsonl")) == passes

    content = json.loads((tmp_path / "throughput.json").read_text())
    assert content.keys() == {"cells", "config", "versions", "hardware"}
    assert content["cells"] == json.loads(json.dumps(cells(passes)))
    found = {(cell["method"], cell["concurrency"], cell["rate"], cell["passes"]) for cell in content["cells"]}
    assert found == {(method, *load, 2) for method in ("plain", "dcoco") for load in ((2, None), (None, 1000.0))}
    for cell in content["cells"]:
        assert cell["completed"] == 10 and cell["total_output_tokens"] == 60
        names = {f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
        names |= {"request_throughput", "output_throughput", "total_token_throughput", "duration"}
        names |= {f"spec_decode_{name}" for name in ("num_drafts", "acceptance_length", "acceptance_rate")}
        assert names <= cell.keys()
    same = [[(t.input_tokens, t.output_tokens) for t in one.timelines] for one in passes if one.repeat == 1]
    assert all(one == same[0] for one in same)  # every method and load got the same prompts


def test_speedups_are_over_plain_under_the_same_load():
    def one(method: str, concurrency: int, end: float) -> Pass:
        return Pass(method, Load(concurrency), 0, [Timeline(1, 0.0, end, [(end, 6)])])

    found = cells([one("plain", 1, 6.0), one("dcoco", 1, 2.0), one("plain", 4, 3.0), one("dcoco", 4, 2.0)])
    assert [cell["speedup"] for cell in found] == pytest.approx([1.0, 3.0, 1.0, 1.5])
    assert [cell["speedup"] for cell in cells([one("dcoco", 1, 2.0)])] == [None]


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    ends = {"plain": 4.0, "dcoco": 2.0}
    loads = [Load(1), Load(4), Load(rate=2.0)]
    passes = [Pass(m, load, 0, [Timeline(1, 0.0, end, [(end, 6)])]) for load in loads for m, end in ends.items()]
    throughput.plot(cells(passes), tmp_path / "throughput.png")
    assert (tmp_path / "throughput.png").stat().st_size > 1000
    throughput.show(cells(passes))


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "grpc"},
        {"baseline": "sglang"},
        {"engine": "http", "fixed": [2]},
        {"concurrency": [], "rate": []},
        {"concurrency": [0]},
        {"concurrency": [64]},
        {"rate": [0.0]},
        {"baseline": "vllm"},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, tmp_path):
    with pytest.raises(ConfigError):
        throughput.check(settings(**changes), tmp_path)


def test_a_run_with_other_settings_is_not_continued(tmp_path):
    config = settings()
    (tmp_path / "throughput.json").write_text(json.dumps({"config": OmegaConf.to_container(config)}))
    throughput.check(settings(concurrency=2, method="dcoco", repeats=5), tmp_path)
    with pytest.raises(ConfigError, match="max_tokens"):
        throughput.check(settings(max_tokens=7), tmp_path)
