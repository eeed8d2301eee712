"""The command line, with a decoder that stands in for the real one."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dcoco
from dcoco import cli
from dcoco.errors import FetchError
from dcoco.server.options import Options
from verifier.sampling import SamplingParams


class FakeDecoder:
    """Streams two chunks and notes what it was given."""

    calls: dict[str, Any]
    chat_template: str | None = "template"
    fault: BaseException | None = None

    @classmethod
    def from_pretrained(cls, target: str, **options: Any) -> "FakeDecoder":
        cls.calls = {"target": target, **options}
        return cls()

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(chat_template=self.chat_template)

    def stream(self, prompt: Any, params: SamplingParams, method: str = "dcoco") -> Any:
        self.calls.update(prompt=prompt, params=params, method=method)
        stats = SimpleNamespace(tokens_per_second=12.34, mean_acceptance_length=2.5)
        yield SimpleNamespace(text="Blue ", output=None)
        if self.fault:
            raise self.fault
        yield SimpleNamespace(text="sky.", output=SimpleNamespace(token_ids=[1, 2, 3], stats=stats))


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> type[FakeDecoder]:
    fake = type("Fake", (FakeDecoder,), {})
    monkeypatch.setattr(dcoco, "DCOCODecoder", fake, raising=False)
    monkeypatch.setattr(dcoco, "SamplingParams", SamplingParams, raising=False)
    return fake


def test_generate_streams_text_and_prints_statistics(
    decoder: type[FakeDecoder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--target", "smollm2_135m", "Why?"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Blue sky.\n"
    assert printed.err == "3 tokens, 12.3 tokens/s, acceptance length 2.50\n"
    assert decoder.calls["prompt"] == [{"role": "user", "content": "Why?"}]
    assert (decoder.calls["params"], decoder.calls["method"]) == (SamplingParams(), "dcoco")
    assert [decoder.calls[name] for name in ("target", "drafter", "device", "dtype")] == ["smollm2_135m"] + [None] * 3


def test_options_reach_the_decoder(decoder: type[FakeDecoder]) -> None:
    options = (
        "--drafter d --method top1 --max-tokens 7 --temperature 0.8 --top-p 0.9 --top-k 5 --seed 3 --dtype float32"
    )
    assert cli.main(["generate", "--target", "t", *options.split(), "Why?"]) == 0
    assert decoder.calls["params"] == SamplingParams(max_tokens=7, temperature=0.8, top_p=0.9, top_k=5, seed=3)
    assert [decoder.calls[name] for name in ("drafter", "method", "dtype")] == ["d", "top1", "float32"]


def test_text_is_completed_when_raw_or_without_template(
    decoder: type[FakeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["generate", "--target", "t", "--raw", "Once"])
    assert decoder.calls["prompt"] == "Once"
    decoder.chat_template = None
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon"))
    cli.main(["generate", "--target", "t", "-"])
    assert decoder.calls["prompt"] == "Once upon"


def test_named_errors_are_one_line_and_exit_code_2(
    decoder: type[FakeDecoder], capsys: pytest.CaptureFixture[str]
) -> None:
    decoder.fault = FetchError("disk full:\n 3 MB free")
    assert cli.main(["generate", "--target", "t", "Why?"]) == 2
    assert capsys.readouterr().err == "error: disk full: 3 MB free\n"
    assert cli.main(["generate", "--target", "t", "--top-p", "2", "Why?"]) == 2
    assert capsys.readouterr().err.startswith("error: top_p=2.0")
    assert cli.main(["generate", "--target", "t", "--threads", "0", "Why?"]) == 2
    assert cli.main(["fetch", "smolm2_135m"]) == 2
    assert "did you mean 'smollm2_135m'" in capsys.readouterr().err
    decoder.fault = KeyboardInterrupt()
    assert cli.main(["generate", "--target", "t", "Why?"]) == 130


def test_targets_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("smollm2_135m ") and "Instruct" in line for line in lines)


def test_fetch_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)


def test_serve_takes_its_address_and_hands_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        "dcoco.server.run",
        SimpleNamespace(serve=lambda options, listener: calls.append((options, listener))),
    )
    monkeypatch.setenv("DCOCO_API_KEY", "secret")
    assert cli.main(["serve", "--target", "t", "--port", "0", "--max-num-seqs", "3", "--grace", "1.5"]) == 0
    ((options, listener),) = calls
    with listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        assert options == Options("t", port=0, max_num_seqs=3, grace=1.5, api_key="secret")
        listener.listen()
        assert cli.main(["serve", "--target", "t", "--port", str(port)]) == 2
    assert f"can't serve at 127.0.0.1:{port}" in capsys.readouterr().err
    for wrong in (["--max-num-seqs", "0"], ["--grace", "nan"], ["--port", "70000"], ["--host", "no.such.host.invalid"]):
        assert cli.main(["serve", "--target", "t", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_serve_names_the_extra_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "dcoco.server.run", raising=False)
    assert cli.main(["serve", "--target", "t", "--port", "0"]) == 2
    assert "needs uvicorn: pip install 'dcoco[serve]'" in capsys.readouterr().err


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["generate", "Why?"], ["generate", "--target", "t", "--method", "magic", "Why?"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    capsys.readouterr()


def test_a_reader_that_leaves_early_causes_no_complaint(tmp_path: Path) -> None:
    """`dcoco targets | head -0`, from another folder than the clone."""
    root = Path(__file__).resolve().parents[2]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-u", "-m", "dcoco.cli", "targets"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
