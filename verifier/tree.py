"""A draft that branches: several continuations of the anchor, verified in one pass of the target.

The pass runs the anchor and N drafted tokens as N + 1 queries. Query 0 is the anchor, query i the i-th node; a node's
parent has a smaller index than the node. Each query sees the context, its ancestors and itself (tree attention; Miao et
al. 2023, arXiv 2305.09781).

Shapes: R rows, N nodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The shape of a drafted tree, for every row."""

    parents: Tensor  # [R, N] int64: the query that each node follows; 0 for padding
    valid: Tensor  # [R, N] bool: False for padding, which fills the rows that have fewer nodes
    sees: Tensor  # [R, N + 1, N + 1] bool: [r, i, j] where j is i or an ancestor of i
    depths: Tensor  # [R, N + 1] int64: tokens between the anchor and the query; 0 for the anchor

    @classmethod
    def build(cls, parents: Tensor, valid: Tensor, levels: int) -> "Tree":
        """From parents int64 [R, N] and valid bool [R, N]; no node is deeper than `levels`."""
        rows, nodes = parents.shape
        # Matrices of zeros and ones: a product joins ancestors of ancestors, so squaring doubles the reach.
        sees = torch.eye(nodes + 1, device=parents.device).repeat(rows, 1, 1)
        sees[:, 1:].scatter_(2, parents[..., None], 1.0)
        reach = 1
        while reach < levels:
            sees = (sees @ sees).clamp_(max=1.0)
            reach *= 2
        return cls(parents, valid, sees > 0, sees.sum(-1).long() - 1)

    def first(self, counts: list[int]) -> "Tree":
        """The tree of the first counts[r] nodes of each row, which hold their own ancestors; padded to the longest."""
        longest = max(counts)
        places = torch.arange(longest, device=self.valid.device)
        valid = self.valid[:, :longest] & (places < torch.tensor(counts, device=self.valid.device)[:, None])
        queries = longest + 1
        return Tree(self.parents[:, :longest], valid, self.sees[:, :queries, :queries], self.depths[:, :queries])
