"""Benchmarks: the folder of JSON lines, the `datasets` fallback (a stand-in module), and what is refused."""

import json
import sys
import types
from pathlib import Path

import pytest

from dcoco.errors import ConfigError
from experiments import benchmarks
from experiments.benchmarks import BENCHMARKS, HUB_SETS, Conversation, load_benchmark


def write_lines(folder: Path, name: str, *rows: object) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return file


def test_reads_prompts_and_turns(tmp_path: Path) -> None:
    write_lines(tmp_path, "gsm8k", {"id": "a", "prompt": "1+1?", "answer": "2"}, "", {"id": "b", "prompt": "2+2?"})
    write_lines(tmp_path, "mt_bench", {"id": "m", "turns": ["first", "second"]})
    assert load_benchmark("gsm8k", tmp_path) == [
        Conversation("a", "gsm8k", ["1+1?"]),
        Conversation("b", "gsm8k", ["2+2?"]),
    ]
    assert load_benchmark("mt_bench", tmp_path) == [Conversation("m", "mt_bench", ["first", "second"])]


def test_limit_stops_before_later_lines_are_parsed(tmp_path: Path) -> None:
    write_lines(tmp_path, "gsm8k", {"id": "a", "prompt": "x"}, "not json")
    assert len(load_benchmark("gsm8k", tmp_path, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "not JSON"),
        ('["a list"]', "neither"),
        ('{"id": "a"}', "neither"),
        ('{"id": "a", "turns": []}', "neither"),
        ('{"id": "a", "turns": ["x", 3]}', "neither"),
        ('{"prompt": "x"}', 'no "id"'),
    ],
)
def test_malformed_line_is_named_by_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    file = write_lines(tmp_path, "gsm8k", {"id": "a", "prompt": "x"}, line)
    with pytest.raises(ConfigError, match=said) as error:
        load_benchmark("gsm8k", tmp_path)
    assert f"{file}:2" in str(error.value)


def test_unknown_name_missing_file_and_bad_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        load_benchmark("gsm8", tmp_path)
    with pytest.raises(ConfigError, match="no file"):
        load_benchmark("gsm8k", tmp_path)
    with pytest.raises(ConfigError, match="limit is 0"):
        load_benchmark("gsm8k", tmp_path, limit=0)


def test_folder_comes_from_argument_then_environment_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("argument", "environment", "default"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder, "gsm8k", {"id": folder, "prompt": "x"})
    monkeypatch.setattr(benchmarks, "DEFAULT_FOLDER", tmp_path / "default")
    monkeypatch.setenv("DCOCO_BENCHMARKS", str(tmp_path / "environment"))
    assert load_benchmark("gsm8k", tmp_path / "argument")[0].id == "argument"
    assert load_benchmark("gsm8k")[0].id == "environment"
    monkeypatch.delenv("DCOCO_BENCHMARKS")
    assert load_benchmark("gsm8k")[0].id == "default"


HUB_ROWS = {
    "aime24": ({"id": 60, "problem": "p"}, "aime24/60", ["p"]),
    "aime25": ({"problem_idx": 1, "problem": "p"}, "aime25/1", ["p"]),
    "alpaca": ({"instruction": "p"}, "alpaca_eval/0", ["p"]),
    "gsm8k": ({"question": "p"}, "gsm8k/test/0", ["p"]),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "p"}, "HumanEval/0", ["p"]),
    "math500": ({"unique_id": "test/a/1.json", "problem": "p"}, "math500/test/a/1.json", ["p"]),
    "mbpp": (
        {"task_id": 11, "text": "t", "test_list": ["a1", "a2"]},
        "mbpp/11",
        ["t\nYour code should pass these tests:\na1\na2"],
    ),
    "mt_bench": ({"prompt_id": 81, "prompt": ["p", "q"]}, "mt_bench/81", ["p", "q"]),
    "swebench_lite": ({"instance_id": "x-1", "problem_statement": "p"}, "x-1", ["p"]),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """No local data, and a `datasets` whose load_dataset gives the returned list of rows."""
    rows: list[dict] = []
    module = types.ModuleType("datasets")
    module.load_dataset = lambda path, name, split, **options: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(benchmarks, "DEFAULT_FOLDER", tmp_path / "none")
    monkeypatch.delenv("DCOCO_BENCHMARKS", raising=False)
    return rows


@pytest.mark.parametrize("name", HUB_ROWS)
def test_hub_rows_become_the_ids_and_prompts_of_the_lines(name: str, hub: list[dict]) -> None:
    row, identity, turns = HUB_ROWS[name]
    hub.append(row)
    assert load_benchmark(name) == [Conversation(identity, name, turns)]


def test_livecodebench_keeps_recent_problems_with_either_kind_of_instruction(hub: list[dict]) -> None:
    row = {"question_id": "q", "question_content": "Q", "starter_code": "", "contest_date": "2024-08-03T00:00:00"}
    hub += [{**row, "contest_date": "2024-07-31T00:00:00"}, row, {**row, "starter_code": "class Solution:"}]
    plain, starter = load_benchmark("livecodebench")
    assert "Question: Q\n\nRead the inputs from stdin" in plain.turns[0]
    assert starter.turns[0].endswith("```python\nclass Solution:\n```")


def test_without_data_and_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks, "DEFAULT_FOLDER", tmp_path / "none")
    monkeypatch.delenv("DCOCO_BENCHMARKS", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="DCOCO_BENCHMARKS"):
        load_benchmark("gsm8k")


@pytest.mark.skipif(not benchmarks.DEFAULT_FOLDER.is_dir(), reason="no benchmark folder beside the clone")
def test_every_benchmark_beside_the_clone_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOCO_BENCHMARKS", raising=False)
    for name in BENCHMARKS:
        items = load_benchmark(name)
        assert len({item.id for item in items}) == len(items) >= 20
        assert {len(item.turns) for item in items} == {2 if name == "mt_bench" else 1}
    assert set(HUB_ROWS) | {"livecodebench"} == set(HUB_SETS)
