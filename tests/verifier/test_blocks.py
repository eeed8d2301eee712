"""Blocks that run in one pass give what each gives in a pass of its own."""

import pytest
import torch

from tests.models import FAMILIES, VOCABULARY
from verifier.cache import RaggedCache
from verifier.packing import Packing
from verifier.target import Block, Target
from verifier.tree import Tree

CONTEXTS, PROMPTS = [9, 4, 4], [7, 2]  # tokens of rows that decode, and of prompts that arrive behind them


def drafts(counts, branching):
    """Anchors and drafts of the decoding rows, so many tokens each."""
    torch.manual_seed(2)
    ids, tree = torch.randint(0, VOCABULARY, (len(counts), max(counts))), None
    if branching:
        parents = torch.tensor([[0, 0, 1, 2][: max(counts) - 1]] * len(counts))
        valid = torch.arange(max(counts) - 1) < torch.tensor(counts)[:, None] - 1
        tree = Tree.build(parents, valid, 4)
    return Block(ids, 0, tree, Packing(counts, contexts=CONTEXTS))


@torch.inference_mode()
def results(target, blocks, together):
    """Hidden states and taps of the blocks' real tokens, and of a token more behind each row's new ones."""
    torch.manual_seed(1)
    cache = RaggedCache(len(CONTEXTS + PROMPTS), 32)
    target.forward(torch.randint(0, VOCABULARY, (len(CONTEXTS), max(CONTEXTS))), cache)
    cache.lengths[: len(CONTEXTS)] = CONTEXTS
    passes = target.forward_blocks(blocks, cache, [-1, 2]) if together else []
    for block in [] if together else blocks:
        passes += target.forward_blocks([block], cache, [-1, 2])
    found = [states.flatten(0, 1) for each in passes for states in (each.hidden, *each.taps)]
    cache.lengths = [context + 1 for context in CONTEXTS] + PROMPTS
    return [*found, *target.forward(torch.full((len(cache.lengths), 1), 5), cache).hidden]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("counts", [[3, 3, 3], [1, 1, 1], [5, 1, 2]])
@pytest.mark.parametrize("branching", [False, True])
def test_prompts_beside_drafts(family, counts, branching):
    if branching and counts == [1, 1, 1]:
        pytest.skip("nothing drafted, nothing branches")
    torch.manual_seed(0)
    target = Target(FAMILIES[family]())
    ids = torch.randint(0, VOCABULARY, (len(PROMPTS), max(PROMPTS)))
    blocks = [drafts(counts, branching), Block(ids, len(CONTEXTS), packing=Packing(PROMPTS, slack=1.0))]
    for ours, alone in zip(results(target, blocks, True), results(target, blocks, False), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


def test_one_row_beside_one_token():
    """Alone neither needs a mask."""
    torch.manual_seed(0)
    target = Target(FAMILIES["gemma3"]())
    one = [Block(torch.tensor([[row + 5]]), row, packing=Packing([1])) for row in range(2)]
    together = target.forward_blocks(one, RaggedCache(2, 8))
    for ours, block in zip(together, one, strict=True):
        alone = target.forward(block.ids_RQ, RaggedCache(1, 8))
        torch.testing.assert_close(ours.hidden, alone.hidden, rtol=1e-4, atol=1e-4)
