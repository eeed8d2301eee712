"""Prompts of the ten benchmarks, from a folder of JSON lines or from the `datasets` library.

    conversations = load_benchmark("gsm8k", limit=20)

A line is `{"id", "benchmark", "prompt"}` or, for several turns, `{"id", "benchmark", "turns"}`; other keys (references,
answers) are for those who grade. The `datasets` library gives the same ids and prompts as the lines do.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dcoco.errors import ConfigError

ENVIRONMENT = "DCOCO_BENCHMARKS"
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One benchmark item: the user's turns in order; the target's answers go between them."""

    id: str
    benchmark: str
    turns: list[str]


@dataclass(frozen=True, slots=True)
class HubSet:
    """A public data set: the arguments of `datasets.load_dataset`, and row index, row -> (id, turns)."""

    path: str
    convert: Callable[[int, dict[str, Any]], tuple[str, list[str]]]
    split: str = "test"
    name: str | None = None
    data_files: tuple[str, ...] = ()
    keep: Callable[[dict[str, Any]], bool] = lambda row: True


def _mbpp(index: int, row: dict[str, Any]) -> tuple[str, list[str]]:
    tests = "\n".join(row["test_list"])
    return f"mbpp/{row['task_id']}", [f"{row['text']}\nYour code should pass these tests:\n{tests}"]


def _livecodebench(index: int, row: dict[str, Any]) -> tuple[str, list[str]]:
    task = (
        "You will be given a question (problem specification) and will generate a correct Python program that matches "
        f"the specification and passes all tests.\n\nQuestion: {row['question_content']}\n\n"
    )
    if row["starter_code"]:
        how = (
            "You will use the following starter code to write the solution to the problem and enclose your code within "
            f"delimiters.\n```python\n{row['starter_code']}\n```"
        )
    else:
        how = (
            "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the "
            "sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, "
            "it reads the inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```"
        )
    return f"livecodebench/{row['question_id']}", [task + how]


HUB_SETS = {
    "aime24": HubSet("HuggingFaceH4/aime_2024", lambda i, row: (f"aime24/{row['id']}", [row["problem"]]), "train"),
    "aime25": HubSet("MathArena/aime_2025", lambda i, row: (f"aime25/{row['problem_idx']}", [row["problem"]]), "train"),
    # The repository's own loading script is no longer run by `datasets`: read its JSON.
    "alpaca": HubSet(
        "json",
        lambda i, row: (f"alpaca_eval/{i}", [row["instruction"]]),
        "train",
        data_files=("hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json",),
    ),
    "gsm8k": HubSet("openai/gsm8k", lambda i, row: (f"gsm8k/test/{i}", [row["question"]]), name="main"),
    "humaneval": HubSet("openai/openai_humaneval", lambda i, row: (row["task_id"], [row["prompt"]])),
    "livecodebench": HubSet(
        "json",
        _livecodebench,
        "train",
        data_files=tuple(
            f"hf://datasets/livecodebench/code_generation_lite/{file}.jsonl" for file in ("test4", "test5", "test6")
        ),
        keep=lambda row: str(row["contest_date"]) >= "2024-08",  # after the training data of most targets
    ),
    "math500": HubSet("HuggingFaceH4/MATH-500", lambda i, row: (f"math500/{row['unique_id']}", [row["problem"]])),
    "mbpp": HubSet("google-research-datasets/mbpp", _mbpp, name="full"),
    "mt_bench": HubSet(
        "HuggingFaceH4/mt_bench_prompts", lambda i, row: (f"mt_bench/{row['prompt_id']}", list(row["prompt"])), "train"
    ),
    "swebench_lite": HubSet(
        "princeton-nlp/SWE-bench_Lite", lambda i, row: (row["instance_id"], [row["problem_statement"]])
    ),
}
BENCHMARKS = tuple(HUB_SETS)


def load_benchmark(name: str, directory: str | Path | None = None, limit: int | None = None) -> list[Conversation]:
    """The first `limit` (default: all) items of a benchmark, in the order of the data.

    Read from `directory`, else from the folder that DCOCO_BENCHMARKS names, else from `../shared/data/benchmarks`
    beside the clone where it exists, else through the `datasets` library. Raises ConfigError for an unknown name, a
    missing folder or file, a malformed line, or data sets that can't be had.
    """
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(f"unknown benchmark {name!r}{hint} Known: {', '.join(BENCHMARKS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1, or none for the whole benchmark")
    folder = directory or os.environ.get(ENVIRONMENT) or (DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None)
    items = _from_hub(name) if folder is None else _from_file(name, Path(folder).expanduser() / f"{name}.jsonl")
    return list(islice(items, limit))


def _from_file(name: str, file: Path) -> Iterable[Conversation]:
    if not file.is_file():
        raise ConfigError(
            f"no file {file} for benchmark {name!r}; "
            f"set benchmark_dir or {ENVIRONMENT} to a folder of <name>.jsonl files"
        )
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(name, line, f"{file}:{number}")


def _parse(name: str, line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); expected one object a line") from error
    turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f'{where} has neither a "prompt" (text) nor "turns" (a list of texts)')
    if not isinstance(row.get("id"), str):
        raise ConfigError(f'{where} has no "id" (text)')
    return Conversation(row["id"], name, turns)


def _from_hub(name: str) -> Iterable[Conversation]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"benchmark {name!r} needs data: set benchmark_dir or {ENVIRONMENT} to a folder of <name>.jsonl files, "
            f"or install the datasets library: pip install 'dcoco[datasets]'"
        ) from error
    source = HUB_SETS[name]
    options = {"data_files": list(source.data_files)} if source.data_files else {}
    try:
        rows = datasets.load_dataset(source.path, source.name, split=source.split, **options)
    except Exception as error:  # hub, network and file errors of many classes
        raise ConfigError(f"benchmark {name!r} can't be loaded from {source.path!r} by `datasets`: {error}") from error
    for index, row in enumerate(rows):
        if source.keep(row):
            identity, turns = source.convert(index, row)
            yield Conversation(identity, name, turns)
