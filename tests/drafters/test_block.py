"""The candidates of a slot: the most probable tokens, or those that may win the target's race."""

import pytest
import torch

from drafters.base import Context
from drafters.block import best_candidates
from verifier.sampling import SamplingBatch, SamplingParams, Stream, exponential_noise, probabilities

ROWS, SLOTS, WORDS, COUNT = 40, 3, 60, 6
IDS = torch.arange(WORDS) * 2 + 1  # tokens that may be drafted
LOGITS = torch.randn(ROWS, SLOTS, WORDS, generator=torch.Generator().manual_seed(0))


def context(sampled=False, **settings):
    """Rows 0, 2, 4, ... are sampled with these settings, the others greedy."""
    each = [SamplingParams(seed=row, **(settings if row % 2 == 0 else {})) for row in range(ROWS)]
    batch = SamplingBatch.stack(each, list(range(ROWS)), torch.device("cpu"))
    positions = torch.arange(SLOTS).expand(ROWS, -1) + 7
    return Context(torch.zeros(ROWS, 1, dtype=torch.int64), positions, batch, sampled)


def winners(logits, context):
    """What a target with these very logits would draw, as columns [R, n]."""
    p = probabilities(logits, context.sampling)
    noise = exponential_noise(context.sampling.seed, context.positions, Stream.TARGET, IDS.expand(*logits.shape))
    return (p / noise).argmax(-1)


@pytest.mark.parametrize("given", [None, context(), context(sampled=True, temperature=1.0)])
def test_the_most_probable_tokens_where_no_noise_is_known(given):
    values, columns = best_candidates(LOGITS, IDS, COUNT, given)
    assert torch.equal(columns, LOGITS.topk(COUNT).indices) and torch.equal(values, LOGITS.topk(COUNT).values)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}], ids=str)
def test_what_a_target_of_the_same_mind_draws_is_always_there(settings, monkeypatch):
    monkeypatch.setattr("drafters.block.FIELD", WORDS)
    given = context(temperature=1.5, **settings)
    won = winners(LOGITS, given)
    values, columns = best_candidates(LOGITS, IDS, COUNT, given)
    assert (columns == won[..., None]).any(-1).all()
    assert torch.equal(values, LOGITS.gather(-1, columns)) and (values.diff(dim=-1) <= 0).all()
    assert all(len(set(slot.tolist())) == COUNT for slot in columns.flatten(0, 1))
    assert torch.equal(columns[1::2], LOGITS[1::2].topk(COUNT).indices)  # greedy rows
    if not settings:  # control: of the most probable ones alone some winners are missing
        assert not (LOGITS.topk(COUNT).indices == won[..., None]).any(-1).all()


def test_only_the_field_races(monkeypatch):
    monkeypatch.setattr("drafters.block.FIELD", 10)
    given = context(temperature=5.0)
    _, columns = best_candidates(LOGITS, IDS, COUNT, given)
    field = LOGITS.topk(10).indices
    assert (columns[..., None] == field[:, :, None]).any(-1).all()
    assert not torch.equal(columns[::2], field[::2, :, :COUNT])
    assert best_candidates(LOGITS[..., :4], IDS[:4], COUNT, given)[1].shape == (ROWS, SLOTS, 4)  # all there are
