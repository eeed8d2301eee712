"""The formulas against simulation, and what they are fed with."""

import random

import pytest
import torch
from omegaconf import OmegaConf

from dcoco import DCOCODecoder, SamplingParams
from dcoco.errors import ConfigError
from experiments import theory
from experiments.bandwidth import linear_bandwidth, read_bandwidth, step_bytes
from experiments.environment import CONF
from experiments.prediction import (
    Costs,
    Round,
    acceptance_by_place,
    acceptance_rate,
    expected_tokens,
    expected_tokens_by_place,
    measured,
    predictions,
    speedup,
)
from experiments.records import Records
from experiments.theory import Case, cases_of, check, markdown, results, rounds_of, run
from tests.models import llama, prompts, tiny_decoder
from verifier.target import Target


def simulated(rate_at, gamma: int, rounds: int, seed: int = 0) -> list[int]:
    """Tokens accepted in each round, if the one at place t is with probability rate_at(t) after those before it."""
    draw, found = random.Random(seed), []
    for _ in range(rounds):
        count = 0
        while count < gamma and draw.random() < rate_at(count + 1):
            count += 1
        found.append(count)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_expected_tokens_are_those_of_a_simulation(alpha, gamma):
    accepted = simulated(lambda place: alpha, gamma, 20_000)
    assert expected_tokens(alpha, gamma) == pytest.approx(1 + sum(accepted) / len(accepted), rel=0.02)
    assert acceptance_rate(accepted, gamma) == pytest.approx(alpha, abs=0.01)


def test_places_tell_what_one_rate_cannot():
    """Later tokens are accepted less often: by place the expectation is exact, for shorter drafts as well."""
    accepted = simulated(lambda place: 0.9 / place**0.5, 8, 40_000)
    rates = acceptance_by_place(accepted, 8)
    assert rates == sorted(rates, reverse=True)
    assert expected_tokens_by_place(rates, 8) == pytest.approx(1 + sum(accepted) / len(accepted))
    shorter = simulated(lambda place: 0.9 / place**0.5, 2, 40_000, seed=1)
    truth = 1 + sum(shorter) / len(shorter)
    assert expected_tokens_by_place(rates, 2) == pytest.approx(truth, rel=0.02)
    assert abs(expected_tokens(acceptance_rate(accepted, 8), 2) - truth) > 0.05 * truth


def test_known_speedups():
    assert speedup(expected_tokens(0.8, 5), drafting=5 * 0.1) == pytest.approx((1 - 0.8**6) / (0.2 * 1.5))
    assert speedup(expected_tokens(0.0, 3), drafting=0.0) == 1.0
    assert speedup(2.0, 0.0, verifying=2.0) == 1.0


def test_predictions_are_what_a_simulated_machine_measures():
    """A drafter with a cost of its own for each draft, a target that verifies more slowly than it steps."""
    step, plain = 0.02, [Round(0, 0.02, 0.0)] * 50
    of_gamma = []
    for gamma in range(1, 9):
        drafting, verifying = 0.001 + 0.002 * gamma, step * (1 + 0.05 * gamma)
        accepted = simulated(lambda place: 0.85 - 0.05 * place, gamma, 20_000, seed=gamma)
        of_gamma.append([Round(count, drafting + verifying, drafting) for count in accepted])
    costs, longest = Costs.of(plain, of_gamma), [one.accepted for one in of_gamma[-1]]
    assert costs.step_seconds == step
    assert costs.drafting == pytest.approx([0.05 + 0.1 * gamma for gamma in range(1, 9)])
    assert costs.verifying == pytest.approx([1 + 0.05 * gamma for gamma in range(1, 9)])
    found = predictions(costs, acceptance_rate(longest, 8), acceptance_by_place(longest, 8), one_pass=False)
    for predicted, rounds in zip(found, of_gamma, strict=True):
        came = measured(plain, rounds)
        assert came["tokens_per_second"] == pytest.approx(came["speedup"] / step)
        assert predicted["by_place"] == pytest.approx(came["speedup"], rel=0.03)
        assert predicted["paper"] > predicted["iid"]  # which pays for verification
    at_once = predictions(costs, 0.5, [0.5] * 8, one_pass=True)
    assert at_once[0]["paper"] == pytest.approx(1.5 / (1 + 0.85))  # a block costs what it costs


@pytest.mark.parametrize("method", ["top1", "walk"])
def test_rounds_have_drafts_of_the_length_that_was_asked(method, monkeypatch):
    decoder, ids, params = tiny_decoder(eos_ids=[]), prompts(1, seed=5)[0], SamplingParams(max_tokens=40)
    entry = {"name": "ours", "method": method}
    config = OmegaConf.create({"systems": [entry], "skip_missing": False, "gamma": 3, "rule": "match"})

    def load(entries, base, skip_missing, **options):
        given = (base.target, base.tokenizer, decoder.drafter, decoder.corrector, list(base.eos_ids))
        return [(entries[0], DCOCODecoder(*given, **options))]

    monkeypatch.setattr(theory, "load_decoders", load)
    cases = cases_of(config, decoder)
    assert [case.gamma for case in cases] == [0, 1, 2, 3]
    plain = decoder.generate([ids], params, "plain")[0]
    for case in cases:
        rounds = rounds_of(case, ids, params)
        assert rounds and all(0 <= one.accepted <= case.gamma for one in rounds)
        assert all(0 <= one.draft_seconds <= one.seconds for one in rounds)
        answer = case.decoder.generate([ids], params, case.method)[0]
        assert answer.token_ids == plain.token_ids
        assert len(rounds) < answer.stats.rounds
        assert len(answer.stats.accepted_at) == case.gamma
    assert len(cases_of(OmegaConf.merge(config, {"gamma": 9}), decoder)) == 1 + 4  # no longer than the drafter's blocks


def test_a_run_is_taken_up_and_reported(tmp_path):
    decoder = tiny_decoder(eos_ids=[])
    cases = [Case("plain", 0, decoder, "plain"), Case("ours", 4, decoder, "walk")]
    asked = [prompts(2, seed=6), prompts(3, seed=7)]
    config = OmegaConf.create({"max_tokens": 20, "temperature": 0.0, "seed": 0})
    records = Records(tmp_path / "raw.jsonl")
    run(cases[:1], asked, records, config)
    first = list(records.rows)
    run(cases, asked, Records(tmp_path / "raw.jsonl"), config)
    rows = Records(tmp_path / "raw.jsonl").rows
    assert rows[: len(first)] == first and len(rows) == 2 * len(first) == 10

    made = [
        {
            "system": system,
            "gamma": gamma,
            "benchmark": 0,
            "prompt": prompt,
            "rounds": [[min(gamma, 1), time, 0.25]] * 4,
        }
        for prompt in (0, 1)
        for system, gamma, time in (("plain", 0, 1.0), ("ours", 1, 1.5), ("ours", 2, 2.0))
    ]
    (one,) = results(made, {"ours": False})
    assert (one["c"], one["best_gamma"]["measured"]) == (0.125, 1)
    assert one["acceptance_by_place"] == [1.0, 0.0]
    assert [length["by_place"] for length in one["lengths"]] == [2 / 1.5, 1.0]
    assert one["largest_error"]["by_place"] == pytest.approx(0.0)
    assert results([*made, {**made[0], "system": "gone", "gamma": 1}], {"ours": False}) == [one]
    with pytest.raises(ConfigError, match="no answer has a whole round of 2 tokens"):
        results([{**row, "rounds": []} if row["gamma"] == 2 else row for row in made], {"ours": False})
    top = {"bytes_per_step": 1, "read_bytes_per_second": 4, "linear_bytes_per_second": 2}
    text = markdown({"systems": [one], "ceiling": {**top, "tokens_per_second": 4, "linear_tokens_per_second": 2}})
    assert "| plain | 1.0 | 25% | 50% |" in text


def test_a_step_reads_every_weight_once():
    """Tied or not, the head is read, and of the embedding one row only; in bfloat16 the matrices are packed."""
    for tied in (True, False):
        model = llama(tied)
        matrices = sum(weight.numel() for name, weight in model.named_parameters() if "embed" not in name)
        head = model.lm_head.weight.numel() if tied else 0
        assert step_bytes(Target(model)) == 4 * (matrices + head)
        assert step_bytes(Target(llama(tied).to(torch.bfloat16))) == 2 * (matrices + head)
    assert read_bandwidth(1, "cpu") > 0 and linear_bandwidth(Target(llama())) > 0


def test_trees_and_a_single_prompt_are_refused(tmp_path):
    config = OmegaConf.load(f"{CONF}/theory.yaml")
    check(config, tmp_path)
    with pytest.raises(ConfigError, match="at least 2"):
        check(OmegaConf.merge(config, {"limit": 1}), tmp_path)
    with pytest.raises(ConfigError, match="lookup drafts as much as it finds"):
        check(OmegaConf.merge(config, {"systems": [{"name": "lookup", "drafter": "prompt_lookup"}]}), tmp_path)
    with pytest.raises(ConfigError, match="tree must have"):
        check(OmegaConf.merge(config, {"systems": [{"name": "tree", "method": "dcoco"}]}), tmp_path)
