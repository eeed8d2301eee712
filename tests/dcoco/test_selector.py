"""DFlash 2's selector: the documented score, none where it must have none; what all rival correctors promise is in
`test_correctors`."""

import pytest
import torch

from dcoco import SamplingParams
from dcoco.errors import DrafterError
from dcoco.selector import Selector, SelectorConfig
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice
from tests.models import corrected, tiny_decoder

WORDS = 15  # of 20: candidates and anchors outside the codebooks occur


def selector(hidden=HIDDEN, ids=None, trained=True):
    """One whose ids have gaps, with a say where it is trained."""
    torch.manual_seed(0)
    ids = torch.arange(2, 2 + WORDS) if ids is None else ids
    made = Selector(SelectorConfig(hidden, len(ids), 6))
    made.draft_ids.copy_(ids)
    if trained:
        for codebook in (made.before, made.after):
            torch.nn.init.normal_(codebook.weight[:-1], std=1.0)
    return made.requires_grad_(False)


def test_scores_are_as_documented():
    made, given = selector(), lattice()
    values = made(given, made.token_table(torch.randn(20, HIDDEN)))
    row_of = {token: row for row, token in enumerate(made.draft_ids.tolist())}

    def pair(before, after, hidden):
        if before not in row_of or after not in row_of:
            return 0.0
        context = made.before.weight[row_of[before]] * (made.hidden_projection.weight @ hidden)
        return (context * made.after.weight[row_of[after]]).sum().item()

    outside = 0
    for row in range(ROWS):
        for slot in range(SLOTS):
            before = given.ids[row, slot - 1].tolist() if slot else [int(given.anchors[row])]
            for i, a in enumerate(before):
                for j, b in enumerate(given.ids[row, slot].tolist()):
                    found = values.rest[row, slot - 1, i, j] if slot else values.first[row, j]
                    expected = given.log_probs[row, slot, j].item() + pair(a, b, given.hidden[row, slot])
                    assert abs(found.item() - expected) < 1e-4
                    outside += a not in row_of or b not in row_of
    assert 0 < outside < ROWS * (CANDIDATES + (SLOTS - 1) * CANDIDATES**2)


def test_what_is_recalled_has_no_say():
    of, asked = tiny_decoder(), SamplingParams(max_tokens=40)
    corrected(of, selector(of.target.hidden_size, of.drafter.draft_ids))
    said = [5, 6, 7, 8] * 5  # a text that would be recalled
    traces = []
    for of.recall in (True, False):
        traces.append(of.generate([said], asked, "walk", trace=True)[0].trace)
    for one, other in zip(*traces, strict=True):
        assert (one.start, one.committed) == (other.start, other.committed)
        assert one.candidates is None or torch.equal(torch.as_tensor(one.candidates), torch.as_tensor(other.candidates))


def test_ids_outside_the_vocabulary_are_refused():
    made = selector(ids=torch.tensor([3, 5, 20]))
    with pytest.raises(DrafterError, match="below the vocabulary's 20"):
        made.token_table(torch.randn(20, HIDDEN))
