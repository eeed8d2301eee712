"""Streams: whole characters, the same text as in one piece, cut before stop strings."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dcoco.detokenizer import REPLACEMENT, Detokenizer
from dcoco.fetch import fetch
from dcoco.targets import resolve_target


class ByteTokenizer:
    """Id i is byte i, so that every character outside ASCII takes several tokens."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids, **_):
        return bytes(ids).decode("utf-8", errors="replace")


TEXTS = [
    "plain",
    "안녕하세요, 세계",
    "你好,世界",
    "👩‍👩‍👧 family 🇰🇷",
    "e\u0301 combining a\u0308\u0323",
    "mixed 한국어 and ümlaut",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text_and_no_character_is_split(text):
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text == detokenizer.text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


class FallbackTokenizer(ByteTokenizer):
    """As tokenizers with byte fallback decode: one broken character spoils the run of bytes that it stands in."""

    def decode(self, ids, **_):
        try:
            return bytes(ids).decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


def test_decoding_never_starts_inside_a_character():
    text = "".join(chr(0x12000 + index) for index in range(6))  # four bytes each: more than the context holds
    detokenizer = Detokenizer(FallbackTokenizer(), [text[4]])
    pieces = []
    for byte in text.encode():
        pieces.append(detokenizer.push(byte))
        if detokenizer.stopped:
            break
    assert "".join(pieces) == text[:4] == detokenizer.text


def test_an_unfinished_character_comes_out_at_the_end():
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.push(byte) for byte in "é".encode()[:1]] == [""]
    assert detokenizer.finish() == "\ufffd" == detokenizer.text


@pytest.mark.parametrize("stop", [["한국"], ["어 and", "국어"], ["xyz", "ü"]])
def test_nothing_of_a_stop_string_is_handed_out(stop):
    text = TEXTS[-1]
    detokenizer = Detokenizer(ByteTokenizer(), stop)
    handed = ""
    for byte in text.encode():
        handed += detokenizer.push(byte)
        if detokenizer.stopped:
            break
    handed += detokenizer.finish()
    expected = text[: min(text.index(one) for one in stop if one in text)]
    assert handed == detokenizer.text == expected


def test_what_only_looked_like_a_stop_string_is_handed_out():
    detokenizer = Detokenizer(ByteTokenizer(), ["abcd"])
    pieces = [detokenizer.push(byte) for byte in b"xabcab"]
    assert pieces == ["x", "", "", "", "abc", ""]
    assert detokenizer.finish() == "ab"
    assert detokenizer.text == "xabcab"


@cache
def tokenizer_of(kind):
    """The real tokenizer of SmolLM2 (byte-level pairs: a character may lie in several tokens), or one of ours."""
    return kind() if kind else AutoTokenizer.from_pretrained(fetch(resolve_target("smollm2_135m")))


def letters(first, last):
    return st.characters(min_codepoint=first, max_codepoint=last, exclude_categories=["Cs", "Cn"])


EMOJI = ["👩‍👩‍👧‍👦", "👨🏽‍🚀", "👍🏿", "🏳️‍🌈", "🇰🇷🇨🇳", "❤️", "1️⃣", "🫠", "🧑‍🤝‍🧑"]
SCRIPTS = {
    "korean": letters(0xAC00, 0xD7A3) | letters(0x1100, 0x11FF),
    "chinese": letters(0x4E00, 0x9FFF) | letters(0x20000, 0x2A6DF),
    "emoji": st.sampled_from(EMOJI) | letters(0x1F300, 0x1FAFF),
    "combining": st.sampled_from("aeou") | letters(0x0300, 0x036F),
    "arabic": letters(0x0600, 0x06FF),
    "devanagari": letters(0x0900, 0x097F),
}
SCRIPTS["mixed"] = st.one_of(*SCRIPTS.values(), st.sampled_from([" ", "\n", "\u200d", "the ", "x", "."]))
KINDS = [None, ByteTokenizer, FallbackTokenizer]


@pytest.mark.parametrize("kind", KINDS, ids=["smollm2", "bytes", "fallback"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stream_in_whole_characters(script, kind):
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(SCRIPTS[script], min_size=1, max_size=25).map("".join))
    def check(text):
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(token) for token in ids]
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert detokenizer.finish() == ""
        assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids) == text

    check()


anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=30)


@pytest.mark.parametrize("kind", KINDS, ids=["smollm2", "bytes", "fallback"])
def test_stop_strings_cut_any_text(kind):
    tokenizer = tokenizer_of(kind)

    def first_stop(ids, stops, min_tokens):
        """The text before the first stop string that is not complete too early, and how many tokens it took to see it:
        decoded anew each time."""
        early = 0  # characters of the first min_tokens
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count])
            if text.endswith(REPLACEMENT):
                continue
            if count <= min_tokens:
                early = len(text)
                continue
            starts = [text.find(stop, max(0, early + 1 - len(stop))) for stop in stops]
            if any(start >= 0 for start in starts):
                return text[: min(start for start in starts if start >= 0)], count
        return tokenizer.decode(ids), len(ids)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.data(), SCRIPTS["mixed"], anything)
    def check(data, repeated, rest):
        text = repeated * data.draw(st.integers(0, 4)) + rest  # what repeats itself keeps half a stop string open
        spans = st.tuples(st.integers(0, len(text)), st.integers(1, 5)).map(lambda span: text[span[0] : sum(span)])
        stops = [stop for stop in data.draw(st.lists(spans | anything, min_size=1, max_size=3)) if stop]
        ids, min_tokens = tokenizer.encode(text), data.draw(st.sampled_from([0, 0, 1, 5, 30]))
        detokenizer, handed, taken = Detokenizer(tokenizer, stops, min_tokens), "", 0
        while taken < len(ids) and not detokenizer.stopped:
            handed += detokenizer.push(ids[taken])
            taken += 1
        handed += detokenizer.finish()
        assert handed == detokenizer.text
        assert (handed, taken) == first_stop(ids, stops, min_tokens)

    check()
