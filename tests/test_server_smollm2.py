"""`dcoco serve` as users start it, with the real model in float32, and OpenAI's own client."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dcoco import DCOCODecoder, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2_135m"
KEY = "a-key"
CHAT: Any = [{"role": "user", "content": "Why is the sky blue?"}]
TEXT = "The three primary colours are"
PATIENCE = 180.0  # seconds until something that must happen is missed


class Serving:
    """A server of its own process, ready when this is made."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "dcoco.cli", "serve", "--target", MODEL, "--port", "0", "--dtype", "float32"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DCOCO_API_KEY": KEY}
        sizes = ["--max-model-len", "512", "--max-num-seqs", "4", "--max-waiting", "4"]
        self.process = subprocess.Popen(
            [*command, *sizes, *options], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.greeting = [self.process.stdout.readline(), self.process.stdout.readline()]
        assert "http://" in self.greeting[0], "the server has not started; what it said is above"
        self.url = self.greeting[0].split()[-1]
        self.client = self.connect(KEY)

    def connect(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=PATIENCE) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"dcoco:{name}{{")]
        return sum(float(line.split()[-1]) for line in lines)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What the target alone says."""
    decoder = DCOCODecoder.from_pretrained(MODEL, drafter="none", dtype="float32")
    chat, text = decoder.generate([CHAT, TEXT], SamplingParams(max_tokens=32), "plain")
    return {"chat": chat, "text": text}


@pytest.fixture(scope="module")
def server(plain: dict[str, Any]) -> Iterator[Serving]:
    serving = Serving("--grace", "0")
    yield serving
    serving.close()


def ask(server: Serving, **more: Any) -> Any:
    arguments = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 32, **more}
    return server.client.chat.completions.create(**arguments)


def test_it_says_what_it_serves(server):
    assert server.greeting[0].startswith("smollm2_135m (float32, method dcoco) at http://127.0.0.1:")
    assert server.greeting[1].startswith("4 rows of 512 tokens: up to 0.1")
    assert server.get("/health") == '{"status":"ok"}'
    assert [model.id for model in server.client.models.list()] == [MODEL]


def test_a_chat_is_the_targets_own(server, plain):
    answer = ask(server)
    assert answer.choices[0].message.content == plain["chat"].text
    assert answer.usage.prompt_tokens == len(plain["chat"].prompt_token_ids)
    assert answer.usage.completion_tokens == len(plain["chat"].token_ids)
    assert (
        answer.usage.model_extra["speculation"]["mean_acceptance_length"] >= 1.0
    )  # how much is drafted depends on the machine


def test_a_completion_is_the_targets_own(server, plain):
    answer = server.client.completions.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=32)
    assert answer.choices[0].text == plain["text"].text
    assert answer.usage.prompt_tokens == len(plain["text"].prompt_token_ids)


def test_a_stream_is_the_targets_own(server, plain):
    *pieces, usage = ask(server, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content for piece in pieces) == plain["chat"].text
    assert pieces[-1].choices[0].finish_reason == plain["chat"].finish_reason
    assert (usage.choices, usage.usage.completion_tokens) == ([], len(plain["chat"].token_ids))


def test_logprobs(server):
    answer = ask(server, logprobs=True, top_logprobs=3, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(entry.token == entry.top_logprobs[0].token and entry.logprob <= 0 for entry in content)


def test_cancelling_a_stream_frees_its_row(server):
    before = server.metric("generation_tokens_total")
    with ask(server, stream=True, max_tokens=400, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        assert server.metric("num_requests_running") == 1
    # Each answer has gone through the engine's thread, behind the cancellation or beside the request that it ends.
    while server.metric("num_requests_running"):
        ask(server, max_tokens=1)
    assert server.metric("generation_tokens_total") - before < 400


def test_errors_are_those_of_the_client(server):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ask(server, top_p=2.0)
    with pytest.raises(openai.BadRequestError, match="tools is not served"):
        ask(server, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="512 together"):
        ask(server, messages=[{"role": "user", "content": "sky " * 1000}])
    with pytest.raises(openai.BadRequestError, match="characters"):
        ask(server, messages=[{"role": "user", "content": "sky " * 20000}])
    with pytest.raises(openai.UnprocessableEntityError, match="seed"):
        ask(server, seed="one")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        ask(server, model="gpt")
    with pytest.raises(openai.APIStatusError, match="bytes") as refused:
        ask(server, messages=[{"role": "user", "content": "x" * 5_000_000}])
    assert refused.value.status_code == 413
    with pytest.raises(openai.AuthenticationError), server.connect("another") as stranger:
        stranger.models.list()
    with pytest.raises(openai.BadRequestError, match="8 answers are the most"):
        ask(server, n=9)
    long = ask(server, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    with long, pytest.raises(openai.RateLimitError, match="wait already"):
        ask(server, n=8)
    assert ask(server, max_tokens=4).usage.completion_tokens == 4


def test_a_taken_port_is_an_error_before_anything_is_loaded(server):
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "dcoco.cli", "serve", "--target", MODEL, "--port", port]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: can't serve at 127.0.0.1:{port}")


def test_sigterm_in_a_stream_ends_it_with_a_message(server):
    """The last test: it ends the server."""
    stream = ask(server, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert server.process.wait(PATIENCE) == 0
