"""What a results cell counts, and the two lengths that are read off a lattice."""

import pytest
import torch

from dcoco import SamplingParams
from experiments.decode import Cell, lattice_lengths
from tests.models import prompts, tiny_decoder


@pytest.mark.parametrize(
    ("candidates", "truth", "expected"),
    [
        ([[1, 9], [2, 8], [3, 7]], [1, 2, 3, 4], (4, 4)),  # all first candidates right, and the target's own token
        ([[1, 9], [8, 2], [3, 7]], [1, 2, 3, 4], (2, 4)),
        ([[9, 1], [2, 8], [6, 7]], [1, 2, 3, 4], (1, 3)),
        ([[5, 6], [2, 8], [3, 7]], [1, 2, 3, 4], (1, 1)),
        ([[1, 9], [2, 8], [3, 7]], [1, 2], (2, 2)),  # the text ends inside the block
    ],
)
def test_lattice_lengths(candidates, truth, expected):
    assert lattice_lengths(torch.tensor(candidates), truth) == expected


def test_a_cell_adds_up():
    decoder = tiny_decoder(eos_ids=[])
    cell, plain_cell = Cell("tiny", "made up", "dcoco"), Cell("tiny", "made up", "plain")
    for prompt in prompts(3, seed=6):
        plain = decoder.generate([prompt], SamplingParams(max_tokens=20), "plain")[0]
        plain_cell.add(plain, plain)
        cell.add(decoder.generate([prompt], SamplingParams(max_tokens=20), trace=True)[0], plain)
    result = cell.result(plain_cell)
    assert result["prompts"] == result["identical_to_plain"] == 3
    assert result["new_tokens"] == 60
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / (60 / plain_cell.stats.seconds))
    assert result["mean_acceptance_length"] == pytest.approx(57 / cell.stats.rounds)
    assert 1 <= result["top1_length"] <= result["oracle_length"]
    assert result["mean_acceptance_length"] <= result["oracle_length"]
    assert sum(result["share"].values()) == pytest.approx(1.0)
    assert plain_cell.result(plain_cell)["mean_acceptance_length"] == 1.0


def test_the_top1_length_is_what_top1_decoding_gets():
    """In a deterministic text, `top1_length` of the same rounds is the plain drafter's acceptance length there."""
    decoder = tiny_decoder(trained=False, eos_ids=[])
    cell = Cell("tiny", "made up", "top1")
    for prompt in prompts(4, seed=7):
        cell.add(decoder.generate([prompt], SamplingParams(max_tokens=30), "top1", trace=True)[0], None)
    assert cell.result(None)["top1_length"] == pytest.approx(cell.stats.mean_acceptance_length)
