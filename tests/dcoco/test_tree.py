"""Draft trees: the most probable nodes by enumeration, attention along branches only, and what is accepted of them."""

from itertools import product

import pytest
import torch

from dcoco import SamplingParams
from dcoco.corrector import Scores
from dcoco.tree import grow
from dcoco.walk import walk
from tests.dcoco.test_walk import CANDIDATES, POSITIONS, ROWS, SLOTS, batch, lattice, scores
from tests.models import prompts, tiny_decoder
from verifier.cache import RaggedCache
from verifier.rejection import verify_match, verify_tree
from verifier.sampling import SamplingParams as Params
from verifier.target import MaskMaker
from verifier.tree import Tree

ALL = torch.full((ROWS,), SLOTS)


def path_of(draft, row, node):
    """The tokens from the anchor to a node (a query index)."""
    path = []
    while node:
        path.append(draft.tokens[row, node - 1].item())
        node = draft.tree.parents[row, node - 1].item()
    return path[::-1]


def enumerate_paths(given, values, row, limit):
    """Every path on the lattice with its probability."""
    first, rest = values.first[row].softmax(-1), values.rest[row].softmax(-1)
    found = {}
    for depth in range(1, limit + 1):
        for picks in product(range(CANDIDATES), repeat=depth):
            p = first[picks[0]].item()
            for slot in range(1, depth):
                p *= rest[slot - 1, picks[slot - 1], picks[slot]].item()
            found[tuple(given.ids[row, slot, pick].item() for slot, pick in enumerate(picks))] = p
    return found


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_most_probable_nodes_are_chosen(size):
    given, values = lattice(), scores()
    values.first *= 2
    values.rest *= 2
    limits = torch.tensor([SLOTS, 2, 0])
    draft = grow(given, values, batch(0.0), POSITIONS, limits, size)
    for row in range(ROWS):
        nodes = [path_of(draft, row, node + 1) for node in range(size) if draft.tree.valid[row, node]]
        everything = enumerate_paths(given, values, row, int(limits[row]))
        best = sorted(everything, key=lambda path: -everything[path])[:size]
        assert sorted(map(tuple, nodes)) == sorted(best)
        assert draft.tree.depths[row, 1 : len(nodes) + 1].tolist() == [len(path) for path in nodes]


def test_certain_transitions_keep_their_parents():
    given = lattice()
    sure = torch.full((ROWS, CANDIDATES), -torch.inf)
    sure[:, 1] = 0.0
    values = Scores(sure, sure[:, None, None].expand(-1, SLOTS - 1, CANDIDATES, -1).contiguous())
    draft = grow(given, values, batch(0.0), POSITIONS, ALL, 4)
    for row in range(ROWS):
        assert path_of(draft, row, 4) == given.ids[row, :, 1].tolist()
        assert draft.tree.valid[row].tolist() == [True] * 4


def test_the_walks_path_leads_the_tree_also_with_the_targets_noise():
    given, values = lattice(), scores()
    for temperature in (0.0, 0.7):
        walked = walk(given, values, batch(temperature), POSITIONS).tokens
        draft = grow(given, values, batch(temperature), POSITIONS, ALL, CANDIDATES * SLOTS)
        for row in range(ROWS):
            paths = [path_of(draft, row, node + 1) for node in range(CANDIDATES * SLOTS)]
            assert walked[row, :1].tolist() == paths[0]
            assert walked[row, :2].tolist() in paths


def random_tree(random, rows, nodes, levels):
    parents = torch.zeros(rows, nodes, dtype=torch.int64)
    depths = torch.zeros(rows, nodes + 1, dtype=torch.int64)
    for row in range(rows):
        for node in range(nodes):
            shallow = (depths[row, : node + 1] < levels).nonzero().flatten()
            parents[row, node] = shallow[torch.randint(len(shallow), (1,), generator=random)]
            depths[row, node + 1] = depths[row, parents[row, node]] + 1
    return parents, depths


def test_a_query_sees_its_ancestors():
    random = torch.Generator().manual_seed(0)
    for levels in (1, 2, 3, 8):
        parents, depths = random_tree(random, 4, 12, levels)
        tree = Tree.build(parents, torch.ones_like(parents, dtype=torch.bool), levels)
        assert torch.equal(tree.depths, depths)
        for row in range(4):
            for query in range(13):
                expected, node = {query}, query
                while node:
                    node = parents[row, node - 1].item()
                    expected.add(node)
                assert set(tree.sees[row, query].nonzero().flatten().tolist()) == expected


def test_the_branch_that_the_target_takes_is_accepted():
    random = torch.Generator().manual_seed(1)
    lengths = []
    for _ in range(60):
        parents, depths = random_tree(random, 1, 10, 4)
        vocabulary = 3
        tokens = torch.randint(vocabulary, (1, 10), generator=random)
        siblings = {}  # keep siblings distinct, as a lattice does
        valid = torch.rand(1, 10, generator=random) < 0.9
        for node in range(10):
            key = (parents[0, node].item(), tokens[0, node].item())
            valid[0, node] &= key not in siblings
            siblings.setdefault(key, node + 1)
        y = torch.randint(vocabulary, (1, 11), generator=random)
        verdict = verify_tree(y, tokens, Tree.build(parents, valid, 4), 4)
        query, committed, path = 0, [], [0]
        while True:
            committed.append(y[0, query].item())
            node = siblings.get((query, committed[-1]))
            if node is None or not valid[0, node - 1]:
                break
            query = node
            path.append(query)
        count = int(verdict.accepted[0])
        assert verdict.tokens[0, : count + 1].tolist() == committed
        assert verdict.path[0, : count + 1].tolist() == path
        assert int(verdict.drafted[0]) == int(valid.sum())
        lengths.append(count)
    assert max(lengths) >= 3 > min(lengths)


def test_a_tree_of_one_path_is_verified_as_a_draft():
    random = torch.Generator().manual_seed(2)
    draft, y = torch.randint(2, (50, 5), generator=random), torch.randint(2, (50, 6), generator=random)
    lengths = torch.randint(0, 6, (50,), generator=random)
    tree = Tree.build(torch.arange(5).repeat(50, 1), torch.arange(5) < lengths[:, None], 5)
    mine, theirs = verify_tree(y, draft, tree, 5), verify_match(y, draft, lengths)
    assert torch.equal(mine.accepted, theirs.accepted)
    for row, count in enumerate(theirs.accepted.tolist()):
        assert torch.equal(mine.tokens[row, : count + 1], theirs.tokens[row, : count + 1])


def texts(decoder, method="dcoco"):
    each = [SamplingParams(max_tokens=24, seed=seed, temperature=0.8 * (seed % 2)) for seed in range(8)]
    return [output.token_ids for output in decoder.generate(prompts(8, seed=3), each, method)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("size", [0, 1, 3, 15, 40])
def test_any_size_gives_the_targets_text(family, size):
    decoder = tiny_decoder(family, tree_size=size, max_rows=5)
    assert texts(decoder) == texts(decoder, "plain")


def test_controls_that_must_fail(monkeypatch):
    """Branches that see each other, and accepted branches that are left where they lie, change the text."""
    truth = texts(tiny_decoder("gemma3"), "plain")
    assert texts(tiny_decoder("gemma3")) == truth
    with monkeypatch.context() as fault:
        fault.setattr(MaskMaker, "tree", lambda self, slots, extent, tree: self.causal(slots, extent))
        assert texts(tiny_decoder("gemma3")) != truth
    with monkeypatch.context() as fault:
        fault.setattr(RaggedCache, "keep", lambda self, moves: None)
        assert texts(tiny_decoder("gemma3")) != truth


def test_a_tree_accepts_more_than_its_best_path():
    lengths = []
    for size in (0, 15):
        decoder = tiny_decoder("gemma3", tree_size=size, eos_ids=[])
        outputs = decoder.generate(prompts(10, seed=4), Params(max_tokens=40))
        lengths.append(sum(o.stats.committed_tokens for o in outputs) / sum(o.stats.rounds for o in outputs))
    assert lengths[1] > 1.1 * lengths[0]
