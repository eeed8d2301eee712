"""Recall: what followed the longest earlier occurrence of the text's end, on the lattice and in the scores."""

import torch

from dcoco.corrector import Corrector, CorrectorConfig
from dcoco.recall import LONGEST, RIGHT, SUFFIX, Continuation, Recalled, continuation, recall
from tests.dcoco.test_walk import CANDIDATES, HIDDEN, ROWS, SLOTS, lattice


def reference(text, slots):
    """The same by comparing strings: (tokens, length of the match)."""
    anchor = len(text) - 1
    best = (0, 0)
    for place in range(anchor):
        matched = 0
        while matched < SUFFIX and matched <= place and text[place - matched] == text[anchor - matched]:
            matched += 1
        best = max(best, (matched, place))
    matched, place = best
    going_on = list(text)
    for step in range(slots if matched else 0):
        going_on.append(going_on[place + 1 + step])
    return going_on[len(text) :], matched


def test_the_longest_and_latest_match_goes_on():
    random = torch.Generator().manual_seed(0)
    for vocabulary in (1, 2, 3, 30):
        rows = [torch.randint(0, vocabulary, (length,), generator=random).tolist() for length in (1, 2, 5, 17, 40)]
        longest = max(map(len, rows))
        garbage = torch.randint(0, vocabulary, (len(rows), longest), generator=random)  # behind the anchors
        for row, text in enumerate(rows):
            garbage[row, : len(text)] = torch.tensor(text)
        anchors = torch.tensor([len(text) - 1 for text in rows])
        found = continuation(garbage, anchors, 6)
        for row, text in enumerate(rows):
            expected, length = reference(text, 6)
            assert found.matched[row] == length
            if length:
                assert found.tokens[row].tolist() == expected, (vocabulary, text)


def test_what_is_recalled_is_a_draft_the_surer_the_longer_the_match():
    found = Continuation(torch.tensor([[5, 6, 7]] * 3), torch.tensor([0, 1, SUFFIX]))
    p = found.draft().log_probs.exp()
    assert found.draft().tokens is found.tokens
    assert p[0].tolist() == [0, 0, 0]  # nothing recalled
    torch.testing.assert_close(p[1], torch.tensor(RIGHT[:3]).cumprod(0))
    torch.testing.assert_close(p[2], torch.tensor(RIGHT[SUFFIX - 1 :][:3]).cumprod(0))


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
