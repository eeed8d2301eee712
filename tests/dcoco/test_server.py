"""The server over HTTP: a tiny model, a real uvicorn, httpx and the official client."""

import json
import shutil
import socket
import subprocess
import threading
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcoco import SamplingParams
from tests.models import LetterTokenizer, prompts, tiny_decoder
from tests.servers import PATIENCE, TestServer, serving


class ChatTokenizer(LetterTokenizer):
    """Has a chat template: the messages' texts one after the other; a keyword `shift` moves every letter."""

    chat_template = "template"

    def apply_chat_template(
        self, conversation: Any, add_generation_prompt: bool, return_dict: bool, **more: Any
    ) -> dict[str, list[int]]:
        if not all(message["role"] in ("system", "user", "assistant") for message in conversation):
            raise ValueError("no such role")
        if conversation[0]["role"] == "assistant":
            raise ValueError("an assistant can't begin")
        ids = [index for message in conversation for index in self(message["content"])["input_ids"]]
        return {"input_ids": [index + more.get("shift", 0) for index in ids]}


def decoder(chat: bool = True) -> Any:
    made = tiny_decoder()
    if chat:
        made.tokenizer = ChatTokenizer()
    return made


PROMPT = prompts(1, seed=3)[0]
TEXT = LetterTokenizer().decode(PROMPT)
CHAT = [{"role": "user", "content": TEXT}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 90}


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(decoder()) as started:
        yield started


@pytest.fixture(scope="module")
def reference() -> Any:
    return decoder()


def expected(reference: Any, prompt: list[int] = PROMPT, **params: Any) -> Any:
    params = {"max_tokens": 24, "ignore_eos": True, **params}
    return reference.generate([prompt], SamplingParams(**params), "plain")[0]


def events(response: httpx.Response) -> list[Any]:
    """The data of all events of a stream; the last one is "[DONE]" where it came to its end."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def metric(server: TestServer, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"dcoco:{name}"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


# -------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("prompt", [TEXT, PROMPT, [TEXT], [PROMPT]])
def test_a_completion_is_the_decoders(server, reference, prompt):
    answer = server.openai.completions.create(prompt=prompt, **_extra(GREEDY))
    output = expected(reference)
    (choice,) = answer.choices
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "tiny", "cmpl-")
    assert (choice.index, choice.text, choice.finish_reason) == (0, output.text, "length")
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_usage_tells_how_well_drafting_went(server):
    usage = server.http.post("/v1/completions", json={**GREEDY, "prompt": TEXT}).json()["usage"]
    found = usage["speculation"]
    assert found["rounds"] * found["mean_acceptance_length"] == pytest.approx(23)
    assert 0 < found["accepted_tokens"] <= found["draft_tokens"] and 0 < found["drafts"] <= found["rounds"]
    assert found["acceptance_per_position"] == sorted(found["acceptance_per_position"], reverse=True)


def test_a_chat_is_the_decoders(server, reference):
    answer = server.openai.chat.completions.create(messages=CHAT, **_extra(GREEDY))
    (choice,) = answer.choices
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", expected(reference).text)
    assert choice.finish_reason == "length"


def test_messages_have_parts_roles_and_template_keywords(server, reference):
    half = len(TEXT) // 2
    parts = [{"type": "text", "text": TEXT[half:]}]
    messages = [{"role": "developer", "content": TEXT[:half]}, {"role": "user", "content": parts, "name": "Ann"}]
    answer = server.http.post("/v1/chat/completions", json={**GREEDY, "messages": messages}).json()
    assert answer["choices"][0]["message"]["content"] == expected(reference).text
    shifted = [index - 1 for index in PROMPT]
    messages = [{"role": "user", "content": LetterTokenizer().decode(shifted)}]
    body = {**GREEDY, "messages": messages, "chat_template_kwargs": {"shift": 1}}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == expected(reference).text


def test_a_chat_may_use_all_the_room(server):
    body = {"messages": CHAT, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == server.engine.max_model_len
    assert (
        server.http.post("/v1/completions", json={"prompt": TEXT, "ignore_eos": True}).json()["usage"][
            "completion_tokens"
        ]
        == 16
    )
    body["max_completion_tokens"] = 3
    assert server.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_several_prompts_with_several_answers(server, reference):
    two = prompts(2, seed=5)
    body = {**GREEDY, "prompt": two, "n": 2, "temperature": 0.9, "seed": 7}
    answer = server.http.post("/v1/completions", json=body).json()
    texts = [
        output.text for prompt in two for output in expected(reference, prompt, n=2, temperature=0.9, seed=7).outputs
    ]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, two))
    assert answer["usage"]["completion_tokens"] == 4 * 24
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        pieces = events(response)[:-1]
    for index, text in enumerate(texts):
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_every_parameter_reaches_the_decoder(server, reference):
    params = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 11, "max_tokens": 30, "min_tokens": 4,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "ignore_eos": False,
        "stop_token_ids": [9],
    }  # fmt: skip
    output = expected(reference, **params, logit_bias={5: -100.0, 40: 2.5})
    body = {**params, "logit_bias": {"5": -100, "40": 2.5}, "prompt": TEXT}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (output.text, output.finish_reason)


def test_stop_strings_cut_the_text(server, reference):
    text = expected(reference).text
    body = {**GREEDY, "prompt": TEXT, "stop": ["no such text", text[9:11]]}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text[: text.find(text[9:11])], "stop")
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert "".join(piece["choices"][0]["text"] for piece in events(response)[:-1]) == whole["text"]


def test_what_asks_for_nothing_is_accepted(server):
    body = {
        **GREEDY, "prompt": TEXT, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "stream": False, "tools": None, "n": 1, "logit_bias": {}, "best_of": 1, "suffix": None, "echo": False,
        "stop": None, "seed": None, "logprobs": None, "response_format": {"type": "text"},
    }  # fmt: skip
    assert server.http.post("/v1/completions", json=body).status_code == 200


# -------------------------------------------------------------------------------------------------------- streams


def test_a_stream_of_a_completion(server, reference):
    body = {**GREEDY, "prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, usage, done = events(response)
    assert done == "[DONE]"
    assert len(pieces) > 1
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected(reference).text
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece["usage"] is None for piece in pieces)
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (len(PROMPT), 24)
    assert usage["usage"]["speculation"]["rounds"] > 0
    assert len({piece["id"] for piece in [*pieces, usage]}) == 1


def test_a_stream_of_a_chat(server, reference):
    stream = server.openai.chat.completions.create(messages=CHAT, stream=True, **_extra(GREEDY))
    pieces = list(stream)
    assert all(piece.object == "chat.completion.chunk" and piece.usage is None for piece in pieces)
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == expected(reference).text
    assert pieces[-1].choices[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------------ log-probabilities


def test_logprobs_of_a_completion(server, reference):
    output = expected(reference, logprobs=3)
    body = {**GREEDY, "prompt": TEXT, "logprobs": 3}
    found = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert found["tokens"] == list(output.text)
    assert found["text_offset"] == list(range(24))
    assert found["token_logprobs"] == pytest.approx(
        [best[token] for token, best in zip(output.token_ids, output.logprobs, strict=True)], abs=1e-4
    )
    assert all(
        3 <= len(best) <= 4 and token in best
        for token, best in zip(found["tokens"], found["top_logprobs"], strict=True)
    )
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        pieces = [piece["choices"][0]["logprobs"] for piece in events(response)[:-1]]
    for name in ("tokens", "text_offset"):
        assert [item for piece in pieces for item in piece[name]] == found[name]


def test_logprobs_of_a_chat(server):
    params = _extra({**GREEDY, "temperature": 1.5, "seed": 2})
    answer = server.openai.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **params)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 2
        assert best == sorted(best, reverse=True)
        assert entry.logprob <= best[0]
        assert bytes(entry.bytes).decode() == entry.token
    bare = server.openai.chat.completions.create(messages=CHAT, logprobs=True, **params)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * 24


# --------------------------------------------------------------------------------------------------------- errors

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
COMPLETION_ERRORS = {
    "range": ({"top_p": 2}, 400, "top_p"),
    "number of answers": ({"n": 0}, 400, "n"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "too many logprobs": ({"logprobs": 21}, 400, "logprobs"),
    "not a number": ({"temperature": float("nan")}, 400, "temperature"),
    "bias of no token": ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    "bias out of the vocabulary": ({"logit_bias": {"64": 1}}, 400, None),
    "unknown": ({"temprature": 1}, 400, "temprature"),
    "unknown null": ({"temprature": None}, 400, "temprature"),
    "best_of": ({"best_of": 2}, 400, None),
    "suffix": ({"suffix": "x"}, 400, None),
    "echo": ({"echo": True}, 400, None),
    "format": ({"response_format": {"type": "json_object"}}, 400, None),
    "no prompt": ({"prompt": None}, 400, "prompt"),
    "empty text": ({"prompt": ""}, 400, None),
    "empty list": ({"prompt": []}, 400, "prompt"),
    "empty ids": ({"prompt": [[]]}, 400, None),
    "foreign id": ({"prompt": [64]}, 400, None),
    "long prompt": ({"prompt": [3] * 128}, 400, None),
    "longer prompt": ({"prompt": TEXT * 1000}, 400, "prompt"),
    "second prompt": ({"prompt": [PROMPT, [64]]}, 400, None),
    "too many answers": ({"n": 10**9}, 400, "n"),
    "options without stream": ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "unknown option": ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options"),
    "long stop": ({"stop": "x" * 1001}, 400, "stop"),
    "model": ({"model": "other"}, 404, "model"),
    "text for a number": ({"max_tokens": "5"}, 422, "max_tokens"),
    "number for a flag": ({"stream": 1}, 422, "stream"),
    "object for a prompt": ({"prompt": {"a": 1}}, 422, "prompt"),
    "mixed prompts": ({"prompt": [1, "a"]}, 422, "prompt"),
    "half of a pair": ({"prompt": "\ud800"}, 400, "prompt"),
}  # fmt: skip
CHAT_ERRORS = {
    "tools": ({"tools": [{"type": "function"}]}, 400, None),
    "image": ({"messages": IMAGE}, 400, "messages"),
    "tool role": ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
    "tool calls": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "messages"),
    "missing messages": ({"messages": None}, 400, "messages"),
    "unknown field of a message": ({"messages": [{"role": "user", "text": "x"}]}, 400, "messages"),
    "template": ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
    "reserved keyword": ({"chat_template_kwargs": {"conversation": []}}, 400, "chat_template_kwargs"),
    "tops without logprobs": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "too many tops": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "long chat": ({"messages": [{"role": "user", "content": TEXT * 1000}]}, 400, "messages"),
    "count for a flag": ({"logprobs": 3}, 422, "logprobs"),
    "number for content": ({"messages": [{"role": "user", "content": 5}]}, 422, "messages"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [("completions", *case) for case in COMPLETION_ERRORS.values()]
    + [("chat/completions", *case) for case in CHAT_ERRORS.values()],
    ids=[*COMPLETION_ERRORS, *CHAT_ERRORS],
)
def test_what_is_wrong_is_named(server, path, change, status, param):
    asked = {"prompt": TEXT} if path == "completions" else {"messages": CHAT}
    response = server.http.post(
        f"/v1/{path}", content=json.dumps({**GREEDY, **asked, **change}), headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    if status == 400 and "is not served" in error["message"]:
        assert next(iter(change)) in error["message"] or param == "messages"


@pytest.mark.parametrize("content", [b"{", b"[1, 2", b"\xff", b'{"n": ' + b"9" * 5000 + b"}", b"[" * 100000])
def test_what_is_not_json_is_a_400(server, content):
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/x", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/health", 405),
    ],
)
def test_wrong_places(server, method, path, status):
    response = server.http.request(method, path)
    assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})


def test_models(server):
    (model,) = server.openai.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "dcoco", 128)
    assert server.openai.models.retrieve("tiny") == model


def test_a_model_without_chat_template_completes_only():
    with serving(decoder(chat=False)) as bare, pytest.raises(openai.BadRequestError, match="use /v1/completions"):
        bare.openai.chat.completions.create(model="tiny", messages=CHAT)


def test_a_key_and_a_limit_of_the_body():
    with serving(decoder(), api_key="schlüssel", max_body_bytes=10_000) as closed:
        assert httpx.get(f"{closed.url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic schlüssel".encode()}):
            response = httpx.post(f"{closed.url}/v1/completions", json={"prompt": TEXT}, headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer schlüssel".encode(), "content-type": "application/json"}
        assert httpx.get(f"{closed.url}/v1/models", headers=right).status_code == 200
        large = json.dumps({"prompt": "x" * 100_000}).encode()
        for content in (large, iter([large[:50_000], large[50_000:]])):  # with its length told, and in chunks
            response = httpx.post(f"{closed.url}/v1/completions", content=content, headers=right)
            assert response.status_code == 413
            assert "10000 bytes" in response.json()["error"]["message"]


# ------------------------------------------------------------------------------------- coming, going, and failing


def test_a_full_queue_is_a_429():
    with serving(decoder(), max_num_seqs=1, max_waiting=1) as full:
        full.steps = 0
        body = {**LONG, "prompt": TEXT, "stream": True}
        with (
            full.http.stream("POST", "/v1/completions", json=body),
            full.http.stream("POST", "/v1/completions", json=body),
        ):
            with pytest.raises(openai.RateLimitError) as refused:
                full.openai.completions.create(prompt=TEXT, **_extra(LONG))
            assert refused.value.response.headers["retry-after"] == "1"
            assert metric(full, "num_requests_waiting") == 2
        full.steps = None
        while metric(full, "num_requests_waiting") + metric(full, "num_requests_running"):
            pass  # until the server has noticed that both have left
        assert full.openai.completions.create(prompt=TEXT, **_extra(GREEDY)).usage.completion_tokens == 24


def test_a_client_that_leaves_a_stream_frees_its_row(server):
    server.cancelled.clear()
    server.steps = 2
    with server.http.stream("POST", "/v1/completions", json={**LONG, "prompt": TEXT, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection closes with it
        assert next(lines).startswith("data: ")
        assert metric(server, "num_requests_running") == 1
    assert server.cancelled.wait(PATIENCE)
    server.steps = None
    assert server.engine.running == 0


@pytest.mark.parametrize("steps", [0, 2], ids=["waiting", "running"])
def test_a_client_that_doesnt_wait_for_its_answer_frees_its_row(server, steps):
    server.submitted.clear()
    server.cancelled.clear()
    server.steps = steps
    body = json.dumps({**LONG, "prompt": TEXT}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        assert server.submitted.wait(PATIENCE)
    assert server.cancelled.wait(PATIENCE)
    server.steps = None
    assert (server.engine.running, len(server.engine.waiting)) == (0, 0)


def test_a_failing_pass_ends_its_requests_only(server, reference, monkeypatch):
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    failed = metric(server, "request_success_total", finished_reason="error")
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.decoder, "round", broken)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            server.openai.completions.create(prompt=TEXT, **_extra(GREEDY))
        with server.http.stream("POST", "/v1/completions", json={**GREEDY, "prompt": TEXT, "stream": True}) as response:
            assert response.status_code == 200
            last = events(response)[-1]
        assert last["error"]["type"] == "server_error"
        assert "out of memory" in last["error"]["message"]
    assert metric(server, "request_success_total", finished_reason="error") == failed + 2
    answer = server.openai.completions.create(prompt=TEXT, **_extra(GREEDY))
    assert answer.choices[0].text == expected(reference).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_told_to_everyone(monkeypatch):
    with serving(decoder()) as dying:
        dying.steps = 0
        with dying.http.stream("POST", "/v1/completions", json={**LONG, "prompt": TEXT, "stream": True}) as response:
            monkeypatch.setattr(dying.engine, "step", None)
            assert "has died" in events(response)[-1]["error"]["message"]
        health = dying.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        with pytest.raises(openai.InternalServerError) as refused:
            dying.openai.completions.create(prompt=TEXT, **_extra(GREEDY))
        assert refused.value.status_code == 503


def test_ending_lets_requests_finish_or_tells_them(reference):
    body = {**LONG, "prompt": TEXT, "stream": True}
    with serving(decoder(), grace=PATIENCE) as patient:
        patient.steps = 0
        with patient.http.stream("POST", "/v1/completions", json=body) as response:
            patient.service.engine_loop.close(PATIENCE)
            patient.steps = None
            assert events(response)[-1] == "[DONE]"
    with serving(decoder()) as hasty:
        hasty.steps = 1
        answers: list[httpx.Response] = []
        hasty.submitted.clear()
        plain = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{hasty.url}/v1/completions", json={**LONG, "prompt": TEXT}))
        )
        plain.start()
        assert hasty.submitted.wait(PATIENCE)
        with hasty.http.stream("POST", "/v1/completions", json=body) as response:
            hasty.uvicorn.should_exit = True
            assert "shutting down" in events(response)[-1]["error"]["message"]
        plain.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "unavailable"


def test_a_server_that_is_ending_takes_no_more():
    with serving(decoder()) as ending:
        ending.http.get("/health")
        ending.service.engine_loop.close()
        assert ending.http.get("/health").json() == {"status": "stopping"}
        with pytest.raises(openai.InternalServerError) as refused:
            ending.openai.completions.create(prompt=TEXT, **_extra(GREEDY))
        assert refused.value.status_code == 503


# ------------------------------------------------------------------------------------------------ what it shows


def test_metrics_add_up():
    with serving(decoder()) as counted:
        answers = [counted.http.post("/v1/completions", json={**GREEDY, "prompt": TEXT, "n": n}).json() for n in (1, 3)]
        counted.steps = 3
        with counted.http.stream("POST", "/v1/completions", json={**LONG, "prompt": TEXT, "stream": True}) as response:
            next(response.iter_lines())
        assert counted.cancelled.wait(PATIENCE)
        counted.steps = None
        cancelled = metric(counted, "generation_tokens_total") - 4 * 24
        assert 1 <= cancelled < 90
        assert metric(counted, "num_requests_running") == metric(counted, "num_requests_waiting") == 0
        assert metric(counted, "prompt_tokens_total") == 5 * len(PROMPT)
        assert metric(counted, "request_success_total", finished_reason="length") == 4
        assert metric(counted, "request_success_total", finished_reason="abort") == 1
        assert metric(counted, "time_to_first_token_seconds_count") == 5
        assert metric(counted, "inter_token_latency_seconds_count") == 4 * 24 + cancelled - 5
        assert metric(counted, "e2e_request_latency_seconds_count") == 4
        told = [answer["usage"]["speculation"] for answer in answers]
        status = counted.http.get("/status.json").json()
        for name, field in (
            ("drafts", "drafts"), ("draft_tokens", "draft_tokens"), ("accepted_tokens", "accepted_tokens")
        ):  # fmt: skip
            total = metric(counted, f"spec_decode_num_{name}_total")
            assert total == status["speculation"][field] >= sum(each[field] for each in told)
        by_position = metric(counted, "spec_decode_num_accepted_tokens_per_pos_total")
        assert by_position == metric(counted, "spec_decode_num_accepted_tokens_total")
        assert metric(counted, "spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0
        assert status["finished"] == {"stop": 0, "length": 4, "abort": 1, "error": 0}
        assert status["state"] == "ok"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome")
def test_the_status_page_in_a_browser(server, tmp_path):
    server.http.post("/v1/completions", json={**GREEDY, "prompt": TEXT})
    status = server.http.get("/status.json").json()
    page = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--virtual-time-budget=1500", "--dump-dom", server.url],
        capture_output=True, text=True, timeout=PATIENCE * 2, check=True,
    ).stdout  # fmt: skip
    assert "<h1>tiny</h1>" in page
    assert "4 rows of 128 tokens" in page
    assert '<span id="state" class="">ok</span>' in page
    assert '<span id="running">0</span>' in page
    assert f'id="length">{status["speculation"]["mean_acceptance_length"]:.2f}</p>' in page
    assert f"{status['prompt_tokens']} prompt tokens" in page
    shown = [share for share in status["speculation"]["acceptance_per_position"] if share >= 0.005]
    assert page.count("<i style=") == len(shown)


def _extra(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the official client, which knows OpenAI's fields only."""
    return {name: value for name, value in body.items() if name != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}
