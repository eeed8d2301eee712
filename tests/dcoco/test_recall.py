"""Recall: what followed the text's end when it stood there before, on the lattice and in the scores."""

import torch

from dcoco.corrector import Corrector, CorrectorConfig
from dcoco.recall import LONGEST, Recalled, recall
from drafters.prompt_lookup import SUFFIX, continuation
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice


def test_recalled_tokens_are_candidates_and_candidates_stay_distinct():
    given = lattice()
    known = given.ids[1, 0, 2].item()
    # Row 0: nothing recalled. Row 1: a known candidate of slot 1, then strangers. Row 2: strangers only.
    history = torch.tensor([[21, 22, 23, 24, 25, 1], [22, 2, known, 29, 22, 2], [3, 3, 28, 26, 3, 3]])
    found, recalled = recall(given, continuation(history, torch.full((ROWS,), 5), SLOTS))
    assert recalled.matched[0].tolist() == [0] * SLOTS
    assert torch.equal(found.ids[0], given.ids[0])
    assert recalled.matched[1].tolist() == [2, 3, 4, 5]
    assert recalled.column[1].tolist() == [2, *[CANDIDATES - 1] * 3]
    assert found.ids[1].gather(1, recalled.column[1][:, None])[:, 0].tolist() == [known, 29, 22, 2]
    assert found.ids[2, :2, -1].tolist() == [28, 26]
    assert all(len(set(slot)) == CANDIDATES for row in found.ids.tolist() for slot in row)
    assert found.log_probs is given.log_probs


def test_long_matches_count_up_to_a_limit():
    given = lattice()
    _, recalled = recall(given, continuation(torch.full((ROWS, 40), 5), torch.full((ROWS,), 39), SLOTS))
    assert recalled.matched[0].tolist() == [min(SUFFIX + slot, LONGEST) for slot in range(SLOTS)]


def test_the_corrector_hears_of_it_only_along_the_recalled_path():
    torch.manual_seed(0)
    corrector = Corrector(CorrectorConfig(HIDDEN, 6, 10))
    torch.nn.init.normal_(corrector.pair_out.weight)
    given, table = lattice(), corrector.token_table(torch.randn(30, HIDDEN))
    column = torch.randint(CANDIDATES, (ROWS, SLOTS))
    matched = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4], [16, 16, 16, 16]])
    with torch.no_grad():
        without = corrector(given, table)
        silent = corrector(given, table, Recalled(column, torch.zeros_like(matched), matched[:, :0]))
        heard = corrector(given, table, Recalled(column, matched, matched[:, :0]))
        torch.testing.assert_close(silent.first, without.first)
        torch.testing.assert_close(silent.rest, without.rest)
        first, rest = (heard.first - without.first).abs() > 1e-6, (heard.rest - without.rest).abs() > 1e-6
    assert not first[0].any() and not rest[0].any()
    for row in (1, 2):
        assert first[row].nonzero().flatten().tolist() in ([column[row, 0].item()], [])
        assert rest[row].any()
        for slot, before, after in rest[row].nonzero().tolist():
            assert [before, after] == column[row, slot : slot + 2].tolist()
