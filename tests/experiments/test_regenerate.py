"""Regeneration: the answers are the target's, an interrupted run goes on, a cut line is written again."""

import json

import pytest
from omegaconf import OmegaConf

from dcoco import DCOCODecoder, SamplingParams
from dcoco.errors import ConfigError
from experiments import regenerate
from tests.models import tiny_decoder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call the entry point on ten prompts; returns the lines written."""
    decoder = tiny_decoder()
    monkeypatch.setattr(DCOCODecoder, "from_pretrained", lambda *_, **__: decoder)
    file = tmp_path / "prompts.jsonl"
    texts = ["".join(chr(256 + 3 + (7 * i + j) % 50) for j in range(1 + 2 * i)) for i in range(10)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    def call(**changes):
        config = OmegaConf.create(
            {
                "target": "tiny", "prompts": str(file), "out": str(tmp_path / "out.jsonl"), "limit": None,
                "max_prompt": 12, "max_tokens": 9, "temperature": 0.0, "seed": 0, "rows": 2, "method": "plain",
                "drafter": None, "dtype": None, "device": None, "threads": 1, **changes,
            }
        )  # fmt: skip
        regenerate.main.__wrapped__(config)
        return [json.loads(line) for line in (tmp_path / "out.jsonl").open()]

    call.decoder = decoder
    call.out = tmp_path / "out.jsonl"
    return call


def test_answers_are_the_targets_and_long_prompts_are_marked_as_skipped(run):
    lines = run()
    assert len(lines) == 10
    answered = [line for line in lines if line["response_ids"]]
    assert len(answered) == 6  # prompts of 1, 3, 5, 7, 9 and 11 tokens
    for line in answered:
        output = run.decoder.generate([line["prompt_ids"]], SamplingParams(max_tokens=9), "plain")[0]
        assert output.token_ids == line["response_ids"]
    assert run(method="dcoco") == lines  # nothing left to do
    run.out.unlink()
    assert run(method="dcoco") == lines


def test_an_interrupted_run_goes_on_behind_its_last_whole_line(run):
    lines = run()
    text = run.out.read_text().splitlines(keepends=True)
    run.out.write_text("".join(text[:8]) + text[8][:10])
    assert run() == lines


def test_no_prompts_is_an_error(run, tmp_path):
    with pytest.raises(ConfigError, match="no JSON-lines file"):
        run(prompts=str(tmp_path / "nowhere"))
