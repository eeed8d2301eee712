"""Draft trees: the most probable nodes by enumeration, attention along branches only, and what is accepted of them."""

from itertools import product

import pytest
import torch

from dcoco import SamplingParams
from dcoco.corrector import Scores
from dcoco.recall import Recalled
from dcoco.tree import grow
from dcoco.walk import walk
from drafters.base import Draft
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


@pytest.mark.parametrize("temperature, scale", [(2e-5, 1.0), (1e-3, 1.0), (0.0, 1e5)])
def test_extreme_scores_keep_parents_before_children_and_siblings_apart(temperature, scale):
    for seed in range(20):
        given, values = lattice(seed), scores(seed)
        values.first *= scale
        values.rest *= scale
        draft = grow(given, values, batch(temperature), POSITIONS, ALL, 40)
        for row in range(ROWS):
            nodes = draft.tree.valid[row].nonzero().flatten().tolist()
            named = {(draft.tree.parents[row, node].item(), draft.tokens[row, node].item()) for node in nodes}
            assert len(named) == len(nodes) >= SLOTS
            assert all(draft.tree.parents[row, node] <= node for node in nodes)


def test_near_greedy_text_is_plain_samplings():
    for seed in (8, 14, 25, 35):
        decoder = tiny_decoder("gemma3", seed=seed, eos_ids=[], worth=0.0)
        each = [SamplingParams(max_tokens=20, temperature=t, seed=1) for t in (2e-5, 5e-5, 1e-4, 1e-3)]
        found = [[o.token_ids for o in decoder.generate(prompts(4, seed=seed), each, m)] for m in ("dcoco", "plain")]
        assert found[0] == found[1]


def test_a_drafter_with_a_finished_draft():
    decoder = tiny_decoder("llama", eos_ids=[])
    draft = decoder.drafter.draft
    decoder.drafter.draft = lambda *arguments: Draft(draft(*arguments).ids[:, :, 0])
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=1)
        output, plain = (decoder.generate([[5, 6, 7]], params, method)[0] for method in ("dcoco", "plain"))
        assert output.token_ids == plain.token_ids
        assert output.stats.draft_tokens <= 4 * output.stats.rounds


def test_only_nodes_that_are_worth_it_are_submitted():
    given, values = lattice(), scores()
    values.first *= 2
    values.rest *= 2
    draft = grow(given, values, batch(0.0), POSITIONS, ALL, 40, worth=0.15)
    for row in range(ROWS):
        likely = [path for path, p in enumerate_paths(given, values, row, SLOTS).items() if p > 0.15]
        nodes = [path_of(draft, row, node + 1) for node in draft.tree.valid[row].nonzero().flatten().tolist()]
        assert sorted(map(tuple, nodes)) == sorted(likely)
    nothing = grow(given, Scores.unary(given), batch(0.0), POSITIONS, ALL, 40, worth=0.99)
    assert nothing.tokens.shape == (ROWS, 0)


def test_a_recalled_text_goes_on_beyond_the_lattice():
    given, values = lattice(), scores()
    column = torch.randint(CANDIDATES, (ROWS, SLOTS), generator=torch.Generator().manual_seed(5))
    rows = torch.arange(ROWS)
    values.first[rows, column[:, 0]] = 12.0
    for slot in range(1, SLOTS):
        values.rest[rows, slot - 1, column[:, slot - 1], column[:, slot]] = 12.0
    beyond = torch.tensor([[15, 16, 17]] * ROWS)
    matched = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 0, 0]])
    recalled = Recalled(column, matched, beyond)
    draft = grow(given, values, batch(0.0), POSITIONS, torch.tensor([9, SLOTS + 2, 9]), 7, recalled, worth=0.5)
    path = [given.ids[row].gather(1, column[row][:, None])[:, 0].tolist() for row in range(ROWS)]
    found = [
        [path_of(draft, row, node + 1) for node in draft.tree.valid[row].nonzero().flatten()] for row in range(ROWS)
    ]
    assert found[0][-1] == [*path[0], 15, 16, 17]
    assert found[1][-1] == [*path[1], 15, 16]
    assert found[2][-1] == path[2]


def test_a_text_that_repeats_itself_outruns_the_block():
    """The same token over and over: the corrector, taught to trust recall, gets whole trees accepted."""
    decoder = tiny_decoder("gemma3", eos_ids=[], tree_size=12)
    loop = decoder.generate(prompts(1), SamplingParams(max_tokens=100), "plain")[0].token_ids[-8:]
    torch.nn.init.zeros_(decoder.corrector.pair_out.weight)
    decoder.corrector.pair_out.weight[0, 0] = 1.0
    decoder.corrector.pair_recalled.weight[1:, 0] = 20.0
    given = [prompts(1)[0] + loop * 3]
    outputs = {m: decoder.generate(given, SamplingParams(max_tokens=60), m)[0] for m in ("plain", "walk", "dcoco")}
    assert outputs["dcoco"].token_ids == outputs["plain"].token_ids == outputs["walk"].token_ids
    assert outputs["walk"].stats.mean_acceptance_length <= decoder.drafter.block_size + 1
    assert outputs["dcoco"].stats.mean_acceptance_length > decoder.drafter.block_size + 1


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
        parents, _ = random_tree(random, 1, 10, 4)
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
@pytest.mark.parametrize("size, worth", [(1, 0.0), (3, 0.0), (15, 0.0), (40, 0.0), (23, 0.08), (23, 0.9)])
def test_any_size_gives_the_targets_text(family, size, worth):
    decoder = tiny_decoder(family, tree_size=size, worth=worth, max_rows=5)
    assert texts(decoder) == texts(decoder, "plain") == texts(decoder, "walk")


def test_controls_that_must_fail(monkeypatch):
    """Branches that see each other, and accepted branches that are left where they lie, change the text."""
    each = [SamplingParams(max_tokens=40, seed=seed, temperature=1.0) for seed in range(12)]

    def sampled(method="dcoco"):
        decoder = tiny_decoder("gemma3", worth=0.0, eos_ids=[])
        return [output.token_ids for output in decoder.generate(prompts(12, seed=3), each, method)]

    truth = sampled("plain")
    assert sampled() == truth
    with monkeypatch.context() as fault:
        fault.setattr(MaskMaker, "tree", lambda self, slots, extent, tree: self.causal(slots, extent))
        assert sampled() != truth
    with monkeypatch.context() as fault:
        fault.setattr(RaggedCache, "keep", lambda self, moves: None)
        assert sampled() != truth


def test_a_tree_accepts_more_than_its_best_path():
    lengths = []
    for method in ("walk", "dcoco"):
        decoder = tiny_decoder("gemma3", worth=0.0, eos_ids=[])
        outputs = decoder.generate(prompts(10, seed=4), Params(max_tokens=40), method)
        lengths.append(sum(o.stats.committed_tokens for o in outputs) / sum(o.stats.rounds for o in outputs))
    assert lengths[1] > 1.1 * lengths[0]
