"""Streams: whole characters, the same text as in one piece, cut before stop strings."""

import pytest

from dcoco.detokenizer import Detokenizer


class ByteTokenizer:
    """Id i is byte i, so that every character outside ASCII takes several tokens."""

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
