"""A comparison counts what was measured, asks everyone the same, and can be stopped and taken up."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dcoco import SamplingParams, Stats
from dcoco.errors import ConfigError, EngineError
from experiments import systems as systems_module
from experiments.compare import FREE, check, largest_p, run, schedule
from experiments.comparison import cells, geometric, markdown, means
from experiments.environment import CONF
from experiments.records import Records, check_resumed
from experiments.systems import LlamaCpp, Ours, Transformers, load_decoders, rotated
from tests.models import EOS, explicit_mask, llama, prompts, tiny_decoder

GREEDY = SamplingParams(max_tokens=12)


def row(system="fast", tokens=40, seconds=1.0, rounds=10, **changes: Any) -> dict[str, Any]:
    stats = Stats(rounds, rounds, 30, 20, 30, [12, 8], seconds, prefill_seconds=0.1)
    stats.phase_seconds["draft"] = seconds / 4
    of = {"benchmark": "gsm8k", "temperature": 0.0, "batch": 1, "repeat": 0, "group": 0}
    made = {"prompts": 1, "new_tokens": tokens, "seconds": seconds, "texts": [7], "stats": asdict(stats), "max_p": None}
    return {"system": system, **of, **made, **changes}


def settings(**changes: Any) -> Any:
    config = OmegaConf.load(f"{CONF}/compare.yaml")
    config.pop("hydra")
    small = {
        "target": "tiny",
        "systems": [{"name": name, "method": method} for name, method in (("plain", "plain"), ("ours", "dcoco"))],
        "benchmark": ["gsm8k", "mbpp"],
        "batch": [1, 2],
        "limit": 2,
        "max_tokens": 12,
        "memory_mib": 1,
    }
    return OmegaConf.merge(config, small, changes)


def test_cells_are_over_plain_on_the_same_prompts():
    rows = [
        row("plain", tokens=20),
        row("plain", tokens=20, repeat=1),
        row("plain", tokens=20, benchmark="mbpp"),
        row(),
        row(tokens=60, repeat=1, texts=[8]),
        row(tokens=80, benchmark="mbpp"),
        row(tokens=10_000, group=1),  # plain hasn't answered these yet
    ]
    found = {(cell["system"], cell["benchmark"]): cell for cell in cells(rows, "plain", ["fast", "plain"])}
    assert list(found) == [("fast", "gsm8k"), ("fast", "mbpp"), ("plain", "gsm8k"), ("plain", "mbpp")]
    cell = found["fast", "gsm8k"]
    assert cell["tokens_per_second"] == pytest.approx(50.0)
    assert cell["speedup"] == pytest.approx(2.5)
    assert cell["speedup_of_repeats"] == {0: pytest.approx(2.0), 1: pytest.approx(3.0)}
    assert (cell["rounds"], cell["committed_tokens"], cell["acceptance_length"]) == (20, 60, pytest.approx(3.0))
    assert cell["acceptance_per_position"] == pytest.approx([1.2, 0.8])
    assert cell["round_ms"] == pytest.approx(90.0)
    assert cell["share"]["draft"] == pytest.approx(0.25)
    assert cell["identical_to_plain"] == 0.5
    mean = next(mean for mean in means(list(found.values())) if mean["system"] == "fast")
    assert mean["speedup"] == pytest.approx(geometric([2.5, 4.0]))
    # The second repeat lacks a benchmark: no mean can be made of it.
    assert mean["speedup_min"] == mean["speedup_max"] == pytest.approx(geometric([2.0, 4.0]))


def test_the_table_has_a_line_for_each_system():
    rows = [row("plain"), row(), row("plain", temperature=1.0, max_p=0.625), row(temperature=1.0)]
    text = markdown(cells(rows, "plain"), "plain", ceiling=200.0)
    assert text.count("\n| fast |") == text.count("\n| plain |") == 2
    assert "largest p is 0.625" in text
    assert "| 40.0 | 20% |" in text
    assert markdown(cells([], "plain"), "plain", ceiling=200.0) == "\n"


def test_every_benchmark_advances_and_nobody_is_always_first():
    groups = list(schedule(settings(temperature=[0.0], batch=[2], repeats=2), {"gsm8k": 4, "mbpp": 5}))
    assert [(g.repeat, g.group, g.benchmark) for g in groups[:4]] == [
        (0, 0, "gsm8k"),
        (0, 0, "mbpp"),
        (0, 1, "gsm8k"),
        (0, 1, "mbpp"),
    ]
    assert len(groups) == 8
    assert [rotated([1, 2, 3], turn)[0] for turn in range(4)] == [1, 2, 3, 1]  # type: ignore[list-item]


def test_a_stopped_run_goes_on(tmp_path):
    decoder, sampled = tiny_decoder(max_rows=2), tiny_decoder(max_rows=2, rule="sampled")
    asked = {"gsm8k": prompts(2, seed=1), "mbpp": prompts(2, seed=2)}
    config = settings(repeats=1)
    everyone = [Ours("plain", decoder, "plain"), Ours("ours", decoder, "dcoco"), Ours("walk", sampled, "walk")]

    class Breaks(Ours):
        calls = 0

        def answer(self, prompts, params):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().answer(prompts, params)

    with pytest.raises(KeyboardInterrupt):
        run([*everyone[:2], Breaks("walk", sampled, "walk")], asked, decoder.target, config, tmp_path)
    before = Records(tmp_path / "raw.jsonl").rows
    assert json.loads((tmp_path / "compare.json").read_text())["cells"]
    with (tmp_path / "raw.jsonl").open("a") as lines:
        lines.write('{"system": "pl')  # as a killed process leaves it
    run(everyone, asked, decoder.target, config, tmp_path)
    rows = Records(tmp_path / "raw.jsonl").rows
    assert rows[: len(before)] == before
    greedy, warm = 2 * (2 + 1), 2 * (2 + 1)  # benchmarks x (groups of one and of two prompts)
    counts = [sum(one["system"] == name for one in rows) for name in ("plain", "ours", "walk")]
    assert counts == [greedy + warm, greedy + warm, warm]  # at temperature 0 all rules decide alike
    assert all(cell["identical_to_plain"] == 1.0 for cell in cells(rows, "plain") if cell["system"] == "ours")
    ceilings = [one["max_p"] for one in rows if one["system"] == "plain" and one["temperature"] > 0]
    assert all(0 < value <= 1 for value in ceilings)


def test_the_largest_p_is_the_bare_models():
    decoder, params = tiny_decoder(eos_ids=[]), SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    outputs = decoder.generate(prompts(2, seed=3), params, "plain")
    expected = []
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        mask = explicit_mask(decoder.target, ids.shape[1])
        logits = decoder.target.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
        expected.append(logits[len(output.prompt_token_ids) - 1 : -1].softmax(-1).amax(-1))
    assert largest_p(decoder.target, outputs, [params] * 2) == pytest.approx(
        float(torch.cat(expected).mean()), rel=1e-4
    )


def test_transformers_gives_the_same_greedy_text():
    decoder = tiny_decoder()
    torch.manual_seed(0)
    model = llama().eval()
    asked = prompts(3, seed=4)
    for lookup in (None, 3):
        system = Transformers("hf", model, decoder.tokenizer, [EOS], lookup)
        assert system.serves(0.0, 1) and system.serves(0.0, 3) == (lookup is None)
        batches = [asked] if lookup is None else [[one] for one in asked]
        outputs = [output for batch in batches for output in system.answer(batch, [GREEDY] * len(batch))]
        plain = decoder.generate(asked, GREEDY, "plain")
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        for output in outputs:
            assert output.stats.committed_tokens == len(output.token_ids) - 1
            assert output.stats.rounds == output.stats.committed_tokens or lookup
            assert 0 < output.stats.prefill_seconds <= output.stats.seconds
            assert (output.finish_reason == "stop") == (output.token_ids[-1] == EOS)


WORKER = """
import json, sys
assert sys.argv[1:] == ["weights.gguf", "40", "2", sys.argv[4]]
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [prompt[:1] * 3 for prompt in asked["prompts"]]
    print(json.dumps({"tokens": tokens, "seconds": 2.0, "prefill_seconds": 0.5}), flush=True)
    if asked["seed"] == 5:
        sys.exit(3)
"""


def test_llama_cpp_is_asked_over_a_pipe(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(systems_module, "WORKER", tmp_path / "worker.py")
    tokenizer = tiny_decoder().tokenizer
    system = LlamaCpp("llama", Path(sys.executable), Path("weights.gguf"), tokenizer, [EOS], 40, 2)
    params = [SamplingParams(seed=5)] * 2
    first, second = system.answer([[4, 9], [EOS]], params)
    assert (first.token_ids, second.finish_reason) == ([4, 4, 4], "stop")
    assert (first.stats.rounds, first.stats.seconds, first.stats.prefill_seconds) == (2, 2.0, 0.5)
    with pytest.raises(EngineError, match="status 3"):
        system.answer([[4]], params[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 3}, "multiple of batch=2"),
        ({"batch": []}, "name at least one"),
        ({"batch": [0]}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"systems": [{"name": "a", "method": "plain"}, {"name": "b", "method": "foo"}]}, "'b': method='foo' must be"),
        ({"systems": [{"name": "a"}]}, "method=None must be"),
        ({"llamacpp": "python"}, "gguf="),
        ({"systems": [{"name": "a", "method": "walk"}]}, "exactly one"),
        ({"systems": [{"name": "a", "method": "plain"}, {"name": "a", "method": "walk"}]}, "a name of its own"),
    ],
)
def test_senseless_settings_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(settings(**changes), tmp_path)


def test_a_run_goes_on_with_the_systems_that_it_began_with(tmp_path):
    """More may join, but a name means what it meant; the settings are noted before the first answer."""

    class Reads(Ours):
        def answer(self, prompts, params):
            assert json.loads((tmp_path / "compare.json").read_text())["config"]["max_tokens"] == 12
            return super().answer(prompts, params)

    decoder, config = tiny_decoder(max_rows=2), settings(repeats=1, temperature=[0.0], batch=[1])
    asked = {"gsm8k": prompts(1), "mbpp": prompts(1)}
    run([Reads("plain", decoder, "plain"), Reads("ours", decoder, "dcoco")], asked, decoder.target, config, tmp_path)
    another = {"name": "more", "method": "top1"}
    check(OmegaConf.merge(config, {"systems": [*config.systems, another]}), tmp_path)
    other = [config.systems[0], {"name": "ours", "method": "top1"}]
    with pytest.raises(ConfigError, match="other system 'ours'"):
        check(OmegaConf.merge(config, {"systems": other}), tmp_path)
    with pytest.raises(ConfigError, match="no folder of a run"):
        check(config, tmp_path / "missing")


def test_another_runs_folder_is_refused(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps({"config": OmegaConf.to_container(settings())}))
    check(settings(repeats=5, batch=1), tmp_path)  # one value stands for a list of one
    with pytest.raises(ConfigError, match="max_tokens"):
        check_resumed(settings(max_tokens=13), tmp_path / "compare.json", FREE)


def test_a_missing_checkpoint_is_named(tmp_path):
    decoder, entries = tiny_decoder(), settings().systems
    entries.append({"name": "rival", "method": "top1", "drafter": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"'rival'.*skip_missing"):
        load_decoders(entries, decoder, skip_missing=False)
    assert [entry.name for entry, _ in load_decoders(entries, decoder, skip_missing=True)] == ["plain", "ours"]
