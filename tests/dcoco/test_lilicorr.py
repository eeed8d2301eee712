"""LiLiCorr's scorer: the documented scores by a loop over nodes; what all rivals promise is in `test_correctors`."""

import pytest
import torch
import torch.nn.functional as F

from dcoco.errors import DrafterError
from dcoco.lilicorr import GAIN, LiLiCorr, LiLiCorrConfig
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice


def scorer(hidden=HIDDEN, block=SLOTS + 1, candidates=CANDIDATES + 2, trained=True):
    """For lattices up to a slot longer and two candidates wider than the given ones."""
    torch.manual_seed(0)
    made = LiLiCorr(LiLiCorrConfig(hidden, block, candidates, 8, 2, 2))
    if trained:
        for parameter in (made.slot_place, made.rank_place, made.apart.weight):
            torch.nn.init.normal_(parameter)
        made.gain.data.fill_(0.2)
    return made.requires_grad_(False)


def test_scores_are_as_documented():
    made, given, embedding = scorer(), lattice(), torch.randn(20, HIDDEN)
    values = made(given, made.token_table(embedding))
    row, heads = 1, made.config.heads

    def unit(x):
        return x / (x.pow(2).mean() + torch.finfo(x.dtype).eps).sqrt()

    nodes, slot_of = [], []
    for slot in range(SLOTS):
        for k in range(CANDIDATES):
            log_prob = given.log_probs[row, slot, k]
            gap, rank = log_prob - given.log_probs[row, slot, 0], k / (CANDIDATES - 1)
            features = torch.stack([log_prob, log_prob.exp(), gap, torch.tensor(rank), torch.tensor(float(k == 0))])
            node = made.token(unit(embedding[given.ids[row, slot, k]])) + made.slot(unit(given.hidden[row, slot]))
            nodes.append(node + made.features(features) + made.slot_place[slot, 0] + made.rank_place[k])
            slot_of.append(slot)
    for layer in made.layers:
        q, k, v = ([layer.qkv(unit(node)).chunk(3)[part] for node in nodes] for part in range(3))
        after = []
        for i, node in enumerate(nodes):
            seen = []
            for head in range(heads):
                part = slice(head * 4, head * 4 + 4)
                apart = [made.apart.weight[slot_of[i] - slot_of[j] + SLOTS, head] for j in range(len(nodes))]
                logits = torch.stack([q[i][part] @ k[j][part] / 2 + apart[j] for j in range(len(nodes))])
                seen.append(sum(weight * v[j][part] for j, weight in enumerate(logits.softmax(0))))
            node = node + layer.attended(torch.cat(seen))
            after.append(node + layer.mlp(unit(node)))
        nodes = after
    anchor = unit(made.anchor(unit(given.anchor_hidden[row])))
    joined = []
    for node in nodes:
        node = unit(node)
        joined.append(F.silu(made.join(torch.cat([node, anchor, node * anchor]))))

    def cosine(out, into):
        return GAIN * made.gain * F.cosine_similarity(out, made.into(joined[into]), dim=0)

    for j in range(CANDIDATES):
        expected = given.log_probs[row, 0, j] + cosine(made.anchor_out(anchor), j)
        torch.testing.assert_close(values.first[row, j], expected, atol=1e-4, rtol=1e-4)
        for slot in range(1, SLOTS):
            for i in range(CANDIDATES):
                out = made.out(joined[(slot - 1) * CANDIDATES + i])
                expected = given.log_probs[row, slot, j] + cosine(out, slot * CANDIDATES + j)
                torch.testing.assert_close(values.rest[row, slot - 1, i, j], expected, atol=1e-4, rtol=1e-4)


def test_a_row_is_scored_by_itself():
    made, given, embedding = scorer(), lattice(), torch.randn(20, HIDDEN)
    table = made.token_table(embedding)
    together = made(given, table)
    for row in range(ROWS):
        alone = made(type(given)(*(value[row : row + 1] for value in vars(given).values())), table)
        torch.testing.assert_close(alone.first[0], together.first[row])
        torch.testing.assert_close(alone.rest[0], together.rest[row])


@pytest.mark.parametrize(("block", "candidates"), [(SLOTS - 1, CANDIDATES), (SLOTS, CANDIDATES - 1)])
def test_another_drafters_lattice_is_refused(block, candidates):
    made, given = scorer(block=block, candidates=candidates), lattice()
    with pytest.raises(DrafterError, match=f"{SLOTS} slots and {CANDIDATES} candidates is too large"):
        made(given, made.token_table(torch.randn(20, HIDDEN)))
