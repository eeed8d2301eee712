"""Corrector and walk: the scores are the documented sum, the path is greedy, q is what the path was drawn from."""

import re

import pytest
import torch

from dcoco.corrector import Corrector, CorrectorConfig, Scores
from dcoco.errors import DrafterError
from dcoco.registry import load_corrector, save_corrector
from dcoco.walk import walk
from drafters.base import Lattice
from tests.models import tiny_decoder
from verifier.sampling import SamplingBatch, SamplingParams

ROWS, SLOTS, CANDIDATES, HIDDEN = 3, 4, 5, 8


def lattice(seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.stack([torch.randperm(20, generator=random)[:CANDIDATES] for _ in range(SLOTS)]) for _ in range(ROWS)]
    )
    logits = torch.randn(ROWS, SLOTS, CANDIDATES, generator=random).sort(-1, descending=True).values
    hidden = torch.randn(ROWS, SLOTS, HIDDEN, generator=random)
    anchor_hidden = torch.randn(ROWS, HIDDEN, generator=random)
    return Lattice(torch.tensor([1, 2, 3]), anchor_hidden, ids, logits.log_softmax(-1), hidden)


def scores(seed=0):
    random = torch.Generator().manual_seed(seed)
    first = torch.randn(ROWS, CANDIDATES, generator=random)
    return Scores(first, torch.randn(ROWS, SLOTS - 1, CANDIDATES, CANDIDATES, generator=random))


def batch(temperature):
    return SamplingBatch.stack([SamplingParams(temperature=temperature, seed=row) for row in range(ROWS)], range(ROWS))


POSITIONS = torch.arange(SLOTS).expand(ROWS, -1) + 7


def test_the_greedy_walk_takes_each_slots_best_continuation():
    given, values = lattice(), scores()
    tokens = walk(given, values, batch(0.0), POSITIONS).tokens
    for row in range(ROWS):
        chosen = int(values.first[row].argmax())
        for slot in range(SLOTS):
            if slot:
                chosen = int(values.rest[row, slot - 1, chosen].argmax())
            assert tokens[row, slot] == given.ids[row, slot, chosen]


def test_unary_scores_give_the_drafters_best():
    given = lattice()
    assert torch.equal(walk(given, Scores.unary(given), batch(0.0), POSITIONS).tokens, given.ids[..., 0])


def test_q_is_the_law_of_the_sampled_walk():
    given, values = lattice(), scores()
    rows, temperature = 4000, 0.8
    big = Lattice(*(x[:1].expand(rows, *x.shape[1:]) for x in vars(given).values()))
    wide = Scores(values.first[:1].expand(rows, -1), values.rest[:1].expand(rows, -1, -1, -1))
    sampling = SamplingBatch.stack([SamplingParams(temperature=temperature)] * rows, range(rows))
    draft = walk(big, wide, sampling, POSITIONS[:1].expand(rows, -1), sampled=True)
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(rows, SLOTS))
    first = (draft.tokens[:, :1] == given.ids[0, 0]).float().mean(0)
    torch.testing.assert_close(first, (values.first[0] / temperature).softmax(-1), atol=0.03, rtol=0)
    # The second slot's q is that of the candidate really chosen before, not a mixture over what might have been.
    chosen = (draft.tokens[:, :1] == given.ids[0, 0]).long().argmax(-1)
    torch.testing.assert_close(draft.q[:, 1], (values.rest[0, 0][chosen] / temperature).softmax(-1))
    for candidate in chosen.unique().tolist():
        mine = draft.tokens[chosen == candidate, 1:2]
        if len(mine) > 500:
            share = (mine == given.ids[0, 1]).float().mean(0)
            torch.testing.assert_close(
                share, (values.rest[0, 0, candidate] / temperature).softmax(-1), atol=0.06, rtol=0
            )


def test_greedy_rows_beside_sampled_ones_have_one_hot_q():
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)]
    draft = walk(lattice(), scores(), SamplingBatch.stack(params, range(ROWS)), POSITIONS, sampled=True)
    assert set(draft.q[0].flatten().tolist()) == {0.0, 1.0}
    assert draft.q[1].max() < 1
    greedy = walk(lattice(), scores(), batch(0.0), POSITIONS).tokens
    assert torch.equal(draft.tokens[::2], greedy[::2])


def test_the_corrector_scores_pairs_as_documented():
    torch.manual_seed(0)
    corrector = Corrector(CorrectorConfig(HIDDEN, 6, 10))
    torch.nn.init.normal_(corrector.pair_out.weight)
    embedding = torch.nn.Embedding(20, HIDDEN)
    given = lattice()
    with torch.no_grad():
        values = corrector(given, corrector.token_table(embedding.weight))

        def unit(x):
            return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

        def represent(token, log_prob, best, rank, hidden):
            scalars = torch.tensor([log_prob, log_prob - best, rank / 16])
            embedded = unit(embedding.weight[token])
            return unit(corrector.token(embedded) + corrector.slot(unit(hidden))[:6] + corrector.scalars(scalars))

        def pair(before, after, hidden_before, hidden_after):
            left, right = corrector.slot(unit(hidden_before))[6:12], corrector.slot(unit(hidden_after))[12:]
            state = corrector.pair_state(unit(left + right))
            inner = corrector.pair_both(before)[:10] + corrector.pair_both(after)[10:] + state
            return corrector.pair_out(inner.clamp(min=0)).item()

        def candidate(row, slot, k):
            logs = given.log_probs[row, slot]
            return represent(given.ids[row, slot, k], logs[k].item(), logs[0].item(), k, given.hidden[row, slot])

        anchor = represent(given.anchors[1], 0.0, 0.0, 0, given.anchor_hidden[1])
        first = pair(anchor, candidate(1, 0, 2), given.anchor_hidden[1], given.hidden[1, 0])
        assert abs(values.first[1, 2] - given.log_probs[1, 0, 2] - first) < 1e-4
        inner = pair(candidate(1, 1, 3), candidate(1, 2, 4), given.hidden[1, 1], given.hidden[1, 2])
        assert abs(values.rest[1, 1, 3, 4] - given.log_probs[1, 2, 4] - inner) < 1e-4


def test_an_untrained_corrector_changes_no_score():
    given = lattice()
    with torch.no_grad():
        corrector = Corrector(CorrectorConfig(HIDDEN, 6, 10))
        values = corrector(given, corrector.token_table(torch.randn(20, HIDDEN)))
    plain = Scores.unary(given)
    assert torch.equal(values.first, plain.first)
    assert torch.equal(values.rest, plain.rest)


def test_a_corrector_is_saved_and_loaded(tmp_path):
    decoder = tiny_decoder()
    save_corrector(tmp_path, decoder.corrector, {})
    again = load_corrector(tmp_path, decoder.target)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, decoder.corrector.state_dict()[name], atol=0.02, rtol=0.01)
    assert load_corrector(tmp_path / "elsewhere", decoder.target) is None


@pytest.mark.parametrize(
    "written, said",
    [
        ("{", "not JSON"),
        ("[]", "a list, not an object"),
        ('{"hidden_size": 32}', "expected"),
        ('{"hidden_size": 32, "width": 16, "pair_width": "16"}', "pair_width='16'"),
        ('{"hidden_size": 32, "width": 0, "pair_width": 16}', "width=0"),
        ('{"hidden_size": 33, "width": 16, "pair_width": 16}', "the target's is 32"),
        ('{"hidden_size": 32, "width": 16, "pair_width": 24}', "pair_out.weight has shape"),
        ('{"hidden_size": 32, "width": 16, "pair_width": 16, "more": 1}', "more"),
        ('{"kind": "oracle"}', "kind='oracle' is unknown; known are contextual, selector, lilicorr"),
        ('{"kind": ["selector"]}', "kind=['selector'] is unknown"),
    ],
)
def test_a_wrong_corrector_is_named(tmp_path, written, said):
    decoder = tiny_decoder()
    save_corrector(tmp_path, decoder.corrector, {})
    (tmp_path / "corrector.json").write_text(written)
    with pytest.raises(DrafterError, match=re.escape(said)):
        load_corrector(tmp_path, decoder.target)


def test_a_damaged_corrector_is_named(tmp_path):
    decoder = tiny_decoder()
    save_corrector(tmp_path, decoder.corrector, {})
    file = tmp_path / "corrector.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(DrafterError, match="truncated or damaged"):
        load_corrector(tmp_path, decoder.target)
    file.unlink()
    with pytest.raises(DrafterError, match="missing"):
        load_corrector(tmp_path, decoder.target)
