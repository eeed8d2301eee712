"""Requests that come, go and fail at random moments: each one's text is what plain decoding gives it alone.

DCOCO_FUZZ_ENGINE sets the number of random lives of an engine.
"""

import gc
import os
import random
import sys
import weakref
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch

from dcoco import SamplingParams
from dcoco.budget import Budget
from dcoco.costs import Costs
from dcoco.engine import Engine
from dcoco.errors import EngineError, ParameterError, QueueFullError
from drafters.base import Draft
from drafters.dflash import DFlashConfig, DFlashDrafter
from tests.models import FAMILIES, VOCABULARY, costs_of, prompts, tiny_decoder

LIVES = int(os.environ.get("DCOCO_FUZZ_ENGINE", "24"))
LONG = SamplingParams(max_tokens=30, ignore_eos=True)
SHAPES = {"block": (4, 6), "single": (1, 1), "wide": (3, 16)}


@cache
def decoder_of(family, shape, trusting=False):
    block, candidates = SHAPES[shape]
    decoder = tiny_decoder(family, block=block, candidates=candidates)
    if trusting:  # recall outweighs everything: trees run far beyond the block
        decoder.corrector.pair_out.weight[0, 0] = 1.0
        decoder.corrector.pair_recalled.weight[1:, 0] = 20.0
    return decoder


@cache
def dflash_decoder(family):
    decoder = tiny_decoder(family)
    torch.manual_seed(1)
    drafter = DFlashDrafter(decoder.target, DFlashConfig.for_target(decoder.target, 2, (0, 3), 4))
    drafter.initialise()
    decoder.drafter, decoder.corrector = drafter.prepare(), None
    return decoder


LEARN = Budget.learn


def learn_no_time(budget, slots, counts, accepted, seconds):
    """What this machine does must not decide what is tested: no round takes a time that says anything."""
    LEARN(budget, slots, counts, accepted, float("inf"))


class Life:
    """An engine, what was asked of it, and which requests had to fail."""

    def __init__(self, seed, patch):
        self.random = draw = random.Random(seed)
        self.family = sorted(FAMILIES)[seed % len(FAMILIES)]
        if self.family in ("llama", "qwen3") and draw.random() < 0.4:
            decoder = dflash_decoder(self.family)
        else:
            decoder = decoder_of(self.family, draw.choice(["block", "block", *SHAPES]), draw.random() < 0.4)
        self.decoder, method = decoder, draw.choice(["dcoco", "dcoco", "walk", "top1", "plain"])
        decoder.tree_size, decoder.worth = draw.randint(1, 30), draw.choice([0.0, 0.02, 0.2, 0.99])
        decoder.recall, a_token = draw.random() < 0.7, draw.choice([None, None, 0.01, 0.3])
        decoder.adaptive, reach = a_token is not None, decoder.reach(method)
        if decoder.adaptive and method != "plain":
            costs = costs_of(a_token or 0.0)
            decoder._budgets = {method: Budget(costs, decoder.drafter.block_size, reach)}
            patch.setattr(Budget, "learn", learn_no_time)
        self.room = draw.choice([2, 17, 64, 100, 128])
        waiting = draw.choice([None, None, 0, 1, 3])
        self.engine = Engine(decoder, method, draw.randint(1, 6), self.room, waiting, trace=True)
        patch.setattr("dcoco.engine.PREFILL_CHUNK", draw.choice([1, 3, 7, 17, 256]))
        patch.setattr("dcoco.engine.DISORDER", draw.choice([1.25, 0.5]))  # below 1: sort whenever rows come
        patch.setattr("verifier.packing.SEGMENT", draw.choice([400, 10]))
        self.asked, self.failing, self.plain = [], [], {}
        self.faults, forward = draw.choice([0.0, 0.0, 0.03, 0.1]), decoder.target.forward_blocks

        def failing(blocks, cache, taps=()):
            if cache is self.engine.batch.cache and draw.random() < self.faults:
                rows = self.engine.batch.requests + self.engine.arriving
                self.failing += [rows[block.first + row] for block in blocks for row in range(len(block.ids_RQ))]
                if draw.random() < 0.5:
                    forward(blocks, cache, taps)
                raise RuntimeError("bad luck")
            return forward(blocks, cache, taps)

        patch.setattr(decoder.target, "forward_blocks", failing)
        propose = decoder.drafter.draft

        def knowing(state, anchors, cache, slots, context):
            """Most drafts know the answer, so that they are accepted whole, in part and not at all."""
            lattice = propose(state, anchors, cache, slots)
            for row, request in enumerate(self.engine.batch.requests):
                known = self.alone(request).token_ids[len(request.token_ids) :][:slots]
                for slot, token in enumerate(known if draw.random() < 0.8 else []):
                    ids = lattice.ids[row, slot]
                    ids[int((ids == token).byte().argmax())] = ids[0].clone()
                    ids[0], lattice.log_probs[row, slot, 0] = token, 3.0
            return lattice

        patch.setattr(decoder.drafter, "draft", knowing)

    def alone(self, request):
        """What plain decoding gives a request with nothing around it."""
        if request not in self.plain:
            engine = Engine(self.decoder, "plain", 1, self.room)
            again = engine.submit(request.prompt_ids, request.params)
            self.plain[request] = [chunk.output for chunk in again][-1]
        return self.plain[request]

    def prompt(self):
        draw, most = self.random, self.room - 1
        length = min(most, draw.choice([1, draw.randint(1, 12), draw.randint(1, most), most]))
        tokens = draw.choice([range(VOCABULARY), [5, 6, 7]])
        return [draw.choice(tokens) for _ in range(length)]

    def params(self, n=1):
        draw, limit = self.random, self.random.choice([1, 2, 5, 9, 14, 2**40 if self.room < 64 else 25])
        penalised, biased, stopped = (draw.random() < 0.3 for _ in range(3))
        return SamplingParams(
            max_tokens=limit,
            temperature=draw.choice([0.0, 0.0, 0.3, 1.0, 1.7]),
            top_p=draw.choice([1.0, 0.9, 0.3]),
            top_k=draw.choice([0, 0, 5, 1000]),
            seed=draw.choice([draw.randint(-(2**63), 2**63 - 1), 2**63 - 1, -(2**63)]),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=[draw.randrange(VOCABULARY)] if stopped else None,
            stop=[chr(256 + draw.randrange(3, VOCABULARY)) for _ in range(2)] if stopped else None,
            min_tokens=min(limit, draw.choice([0, 0, 3, 8])),
            logprobs=draw.choice([None, None, 0, 3]),
            repetition_penalty=draw.choice([0.7, 1.5]) if penalised else 1.0,
            frequency_penalty=draw.choice([-2.0, 0.5]) if penalised else 0.0,
            logit_bias={draw.randrange(VOCABULARY): 5.0, draw.randrange(VOCABULARY): -100.0} if biased else None,
            n=n,
        )

    def act(self):
        draw, engine = self.random, self.engine
        action = draw.choices(["submit", "submit_all", "cancel", "step", "iterate"], [6, 1, 2, 12, 4])[0]
        if action in ("submit", "submit_all"):
            params = self.params(draw.choice([1, 2, 4]) if action == "submit_all" else 1)
            most = engine.max_num_seqs + (float("inf") if engine.max_waiting is None else engine.max_waiting)
            if params.n + engine.running + len(engine.waiting) > most:
                with pytest.raises(QueueFullError if params.n <= most else ParameterError):
                    engine.submit_all(self.prompt(), params)
            elif action == "submit":
                self.asked.append(engine.submit(self.prompt(), params))
            else:
                self.asked += engine.submit_all(self.prompt(), params)
        elif action == "step":
            engine.step()
        elif self.asked and action == "cancel":
            request = draw.choice(self.asked)
            ended = request.output, request.error
            engine.cancel(request)
            assert request.done and ended in ((None, None), (request.output, request.error))
        elif self.asked:
            request = draw.choice(self.asked)
            try:
                chunk = next(iter(request))
                assert chunk.token_ids == request.token_ids[len(request.token_ids) - len(chunk.token_ids) :]
            except EngineError as error:
                assert error is request.error

    def check_rows(self):
        """Each row holds prompt and answer up to the anchor, and its text lies in the history."""
        batch, arriving = self.engine.batch, self.engine.arriving
        assert self.engine.running <= self.engine.max_num_seqs and len(batch.anchors) == len(batch.requests)
        for row, request in enumerate(batch.requests + arriving):
            text = request.prompt_ids + request.token_ids
            assert not request.done and batch.history[row, : len(text)].tolist() == text
            if row < len(batch.requests):
                assert batch.cache.lengths[row] == len(text) - 1 and batch.anchors[row] == text[-1]

    def check(self, request):
        plain = self.alone(request)
        assert request.done and not (request.output and request.error)
        if request.error is not None:
            assert request in self.failing and "bad luck" in str(request.error)
            assert plain.token_ids[: len(request.token_ids)] == request.token_ids
            return
        output, stats = request.result(), request.stats
        assert request not in self.failing
        if output.finish_reason == "cancelled":
            assert plain.token_ids[: len(output.token_ids)] == output.token_ids
            assert plain.text.startswith(output.text)
        else:
            assert output.token_ids == plain.token_ids
            assert (output.text, output.finish_reason) == (plain.text, plain.finish_reason)
        if request.params.logprobs is not None:
            for one, other, token in zip(output.logprobs, plain.logprobs, output.token_ids, strict=False):
                assert one[token] == pytest.approx(other[token], abs=1e-3)
            assert len(output.logprobs) == len(output.token_ids)
        assert stats.committed_tokens == max(0, len(output.token_ids) - 1) == sum(t.committed for t in output.trace)
        assert sum(stats.accepted_at) == stats.accepted_tokens <= stats.draft_tokens
        assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
        assert stats.accepted_tokens <= stats.committed_tokens <= stats.accepted_tokens + stats.rounds
        assert stats.rounds == len(output.trace) <= stats.committed_tokens
        assert stats.drafts <= min(stats.rounds, stats.draft_tokens)


@pytest.mark.parametrize("seed", range(LIVES))
def test_every_text_is_its_own(seed, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "dcoco.engine")
    life = Life(seed, monkeypatch)
    for _ in range(40):
        life.act()
        life.check_rows()
    steps = 0
    while life.engine.busy:
        life.engine.step()
        life.check_rows()
        steps += 1
        assert steps < 5000
    assert life.engine.running == len(life.engine.waiting) == len(life.engine.batch.anchors) == 0
    life.faults = 0.0
    for request in life.asked:
        life.check(request)


def test_the_random_lives_are_lively(monkeypatch, caplog):
    """Negative control: there are cancellations, failures and full answers, and drafts that are accepted."""
    caplog.set_level("CRITICAL", "dcoco.engine")
    endings, accepted = set(), 0
    for seed in range(16):
        with monkeypatch.context() as patch:
            life = Life(seed, patch)
            life.faults = 0.05
            for _ in range(40):
                life.act()
        endings |= {
            "error" if request.error else request.output.finish_reason for request in life.asked if request.done
        }
        accepted += sum(request.stats.accepted_tokens for request in life.asked)
    assert endings == {"error", "stop", "length", "cancelled"} and accepted > 100


def plain_ids(decoder, given, params=LONG):
    return [output.token_ids for output in decoder.generate(given, params, "plain")]


@pytest.mark.parametrize("moment", range(6))
def test_cancelling_frees_a_row_and_disturbs_nobody(moment):
    """At moment 0 all wait; then they arrive, in chunks, and decode."""
    decoder = tiny_decoder("gemma3", tree_size=3)
    engine, given = Engine(decoder, max_num_seqs=3), prompts(6, seed=2)
    requests = [engine.submit(ids, LONG) for ids in given]
    for _ in range(moment):
        engine.step()
    for _ in range(2):
        engine.cancel(requests[0])
        engine.cancel(requests[4])
    while engine.busy:
        engine.step()
    plain = plain_ids(decoder, given)
    for index, request in enumerate(requests):
        if index in (0, 4):
            assert request.result().finish_reason == "cancelled"
            assert request.token_ids == plain[index][: len(request.token_ids)] != plain[index]
        else:
            assert request.result().token_ids == plain[index]


def test_an_iteration_may_cancel_and_submit_and_take_turns():
    decoder, given = tiny_decoder(tree_size=4), prompts(4, seed=3)
    engine, plain = Engine(decoder, max_num_seqs=2), plain_ids(tiny_decoder(), prompts(4, seed=3))
    first, second, gone = (engine.submit(ids, LONG) for ids in given[:3])
    found, late = {first: [], second: []}, None
    for request, turn in [(first, iter(first)), (second, iter(second))] * 3:
        found[request] += next(turn).token_ids
        engine.cancel(gone)
        late = late or engine.submit(given[3], LONG)
    for request in (first, second):
        found[request] += [token for chunk in request for token in chunk.token_ids]
    assert [found[first], found[second]] == plain[:2]
    tokens = []
    for chunk in late:
        tokens += chunk.token_ids
        engine.cancel(late)
    assert late.result().finish_reason == "cancelled" and tokens == late.token_ids == plain[3][: len(tokens)]
    assert [chunk.output.finish_reason for chunk in gone] == ["cancelled"]  # it says so when asked again
    assert not engine.busy


def test_engines_over_one_decoder_and_generate_in_between(monkeypatch):
    """They share the models and, by method, the budget."""
    monkeypatch.setattr(Budget, "learn", learn_no_time)
    decoder, given = tiny_decoder("qwen3", adaptive=True), prompts(6, seed=4)
    budget = Budget(costs_of(0.05), 4, decoder.tree_size)
    decoder._budgets = {"dcoco": budget}
    engines = [Engine(decoder, "dcoco", 2, 60), Engine(decoder, "dcoco", 3, 90)]
    plain = plain_ids(decoder, given)
    requests = [engines[index % 2].submit(ids, LONG) for index, ids in enumerate(given)]
    for engine in engines:
        engine.step()
    assert decoder.generate([given[0]], LONG)[0].token_ids == plain[0]
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    assert [request.result().token_ids for request in requests] == plain


def failing_once(monkeypatch, decoder, times=1):
    """The next passes raise."""
    left, forward = [times], decoder.target.forward_blocks

    def fail(*args, **kwargs):
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("bad luck")
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder.target, "forward_blocks", fail)


def test_a_pass_that_fails_takes_only_its_requests_with_it(monkeypatch, caplog):
    decoder, given = tiny_decoder(), prompts(4, seed=5)
    engine, plain = Engine(decoder, max_num_seqs=2), plain_ids(tiny_decoder(), prompts(4, seed=5))
    first, cancelled = engine.submit(given[0], LONG), engine.submit(given[1], LONG)
    engine.step()
    engine.cancel(cancelled)
    arriving, waiting = (engine.submit(ids, LONG) for ids in given[2:])
    failing_once(monkeypatch, decoder)
    assert set(engine.step()) == {first, arriving}
    assert "2 requests failed" in caplog.text and "Traceback" in caplog.text
    for request in (first, arriving):
        with pytest.raises(EngineError, match=r"the request failed: RuntimeError\('bad luck'\)"):
            list(request)
        assert request.done and request.output is None
    again = engine.submit(given[2], LONG)
    while engine.busy:
        engine.step()
    assert [waiting.result().token_ids, again.result().token_ids] == [plain[3], plain[2]]
    with pytest.raises(EngineError, match="send it again"):
        arriving.result()


def interrupted(run, moment):
    """Ctrl-C before the line number `moment` that `run` comes to in engine and cache; returns how many were left."""
    before, left = sys.gettrace(), moment

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("dcoco/engine.py", "verifier/cache.py")):
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt) if moment < sys.maxsize else nullcontext():
            run()
    finally:
        sys.settrace(before)
    return left


def test_ctrl_c_at_any_moment_spoils_no_text(monkeypatch):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 17)
    monkeypatch.setattr("dcoco.engine.DISORDER", 0.5)
    decoder, given = tiny_decoder("qwen3"), prompts(7, seed=5)
    each = [SamplingParams(max_tokens=3 + 3 * i, ignore_eos=True, frequency_penalty=0.5 * (i % 2)) for i in range(7)]
    plain, finished = plain_ids(decoder, given, each), []

    def life(moment):
        engine = Engine(decoder, max_num_seqs=4)
        requests = [engine.submit(ids, params) for ids, params in zip(given, each, strict=True)]

        def run():
            engine.step()
            engine.cancel(requests[2])
            while engine.busy:
                engine.step()

        left = interrupted(run, moment)
        while engine.busy:
            engine.step()
        assert all(request.done for request in requests) and engine.running == 0
        for request, ids in zip(requests, plain, strict=True):
            whole = request.output is not None and request.output.finish_reason == "length"
            finished.append(whole)
            assert request.token_ids == (ids if whole else ids[: len(request.token_ids)])
        return moment - left

    lines = life(sys.maxsize)
    assert finished == [True, True, False, True, True, True, True]
    for part in range(1, 24):
        life(lines * part // 24)
    assert 40 < sum(finished) < 130


def test_memory_that_does_not_suffice_fails_one_request(monkeypatch, caplog):
    decoder, given = tiny_decoder(), prompts(3, seed=5)
    engine, plain = Engine(decoder), plain_ids(decoder, given)
    monkeypatch.setattr("dcoco.engine.TokenCounts", None)
    each = [LONG, SamplingParams(presence_penalty=1.0), LONG]
    requests = [engine.submit(ids, params) for ids, params in zip(given, each, strict=True)]
    assert engine.step().count(requests[1]) == 1
    while engine.busy:
        engine.step()
    assert "TypeError" in str(requests[1].error) and not requests[1].token_ids
    assert [requests[0].result().token_ids, requests[2].result().token_ids] == [plain[0], plain[2]]


@pytest.mark.parametrize("method", ["dcoco", "plain"])
@pytest.mark.parametrize("count", [0, 5])
def test_a_token_that_can_not_become_text_fails_its_own_request(monkeypatch, caplog, method, count):
    decoder, given = tiny_decoder(), prompts(3, seed=5)
    engine, plain = Engine(decoder, method), plain_ids(decoder, given)
    requests = [engine.submit(ids, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0)) for ids in given]
    push, detokenizer = requests[1]._detokenizer.push, requests[1]._detokenizer
    monkeypatch.setattr(detokenizer, "push", lambda token: push(token if len(detokenizer._ids) < count else None))
    while engine.busy:
        engine.step()
    assert "TypeError" in str(requests[1].error) and "can't become text" in caplog.text
    assert requests[1].token_ids == plain[1][:count] and len(requests[1].logprobs) == count
    assert [requests[0].result().token_ids, requests[2].result().token_ids] == [plain[0], plain[2]]


def test_nothing_is_kept_of_a_pass_that_failed(monkeypatch, caplog):
    caplog.set_level("CRITICAL", "dcoco.engine")  # the log's record holds the traceback, and pytest all records
    decoder, seen = tiny_decoder(), []

    def fail(module, args, output):
        seen.append(weakref.ref(output if isinstance(output, torch.Tensor) else output[0]))
        raise RuntimeError("bad luck")

    with decoder.target.layers[2].register_forward_hook(fail):
        engine, taps = Engine(decoder), decoder.drafter.taps
        request = engine.submit([5], LONG)
        gc.disable()
        try:
            engine.step()
            assert request.error is not None and [reference() for reference in seen] == [None]
        finally:
            gc.enable()
    assert taps and not decoder.target.tapped


@pytest.mark.parametrize("moment", ["prompt", "round"])
@pytest.mark.parametrize("make", [tiny_decoder, dflash_decoder])
def test_a_failed_pass_leaves_no_nan_in_any_row(monkeypatch, caplog, make, moment):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 50)
    decoder, given = make("qwen3"), [[5] * 50, [6] * 9, [7] * 60, [8] * 3, [9] * 20]
    engine, plain = Engine(decoder, max_num_seqs=3), plain_ids(decoder, given)
    requests = [engine.submit(ids, LONG) for ids in given[:2]]  # one chunk each
    if moment == "round":
        engine.step()
        engine.step()
    observe = decoder.drafter.observe
    poison = decoder.target.embedding.register_forward_hook(lambda module, args, output: output * torch.nan)

    def fail(*args):
        observe(*args)
        poison.remove()
        monkeypatch.setattr(decoder.drafter, "observe", observe)
        raise RuntimeError("bad luck")

    monkeypatch.setattr(decoder.drafter, "observe", fail)
    engine.step()
    requests += [engine.submit(ids, LONG) for ids in given[2:]]
    while engine.busy:
        engine.step()
    assert [request.error is None for request in requests] == [False, moment == "prompt", True, True, True]
    found = [(index, request.token_ids) for index, request in enumerate(requests) if request.error is None]
    assert found == [(index, plain[index]) for index, _ in found]


def test_queue_limits_count_free_rows_and_all_answers():
    engine = Engine(tiny_decoder(), max_num_seqs=2, max_waiting=1)
    two = SamplingParams(max_tokens=4, n=2, seed=2**63 - 1, temperature=1.0)
    requests = engine.submit_all([5], two)
    assert [request.seed for request in requests] == [2**63 - 1, -(2**63)]
    with pytest.raises(QueueFullError):
        engine.submit_all([5], two)
    with pytest.raises(ParameterError, match=r"n=2147483647: 3 answers .* max_num_seqs=2 run and max_waiting=1 wait"):
        engine.submit_all([5], SamplingParams(n=2**31 - 1))  # at once: none is made
    assert len(engine.waiting) == 2  # all or none
    engine.submit([5], LONG)
    with pytest.raises(QueueFullError, match="3 requests wait already and 1 may"):
        engine.submit([6], LONG)
    engine.cancel(requests[0])
    engine.submit([6], LONG)
    engine.step()
    with pytest.raises(QueueFullError):
        engine.submit([7], LONG)
    while engine.busy:
        engine.step()


def test_the_longest_prompt_gets_one_token():
    decoder = tiny_decoder()
    for method in ("dcoco", "plain"):
        engine = Engine(decoder, method, 2, 40)
        request = engine.submit([5] * 39, SamplingParams(max_tokens=2**62, ignore_eos=True))
        assert [len(chunk.token_ids) for chunk in request] == [1] and request.output.finish_reason == "length"
        with pytest.raises(ParameterError, match="40 tokens; prompt and answer may have 40 together"):
            engine.submit([5] * 40, LONG)
    assert engine.max_model_len == 40 and Engine(decoder, max_model_len=10**6).max_model_len == 128


def test_sizes_that_make_no_sense_are_refused():
    decoder = tiny_decoder()
    for name, values in {
        "max_num_seqs": [0, "8", 2.5, None, True],
        "max_waiting": [-1, "8", 0.0, False],
        "max_model_len": [1, "8", 2.5, True],
        "method": ["fast", None, 3],
    }.items():
        for value in values:
            with pytest.raises(ParameterError, match=f"{name}={value!r}: must be"):
                Engine(decoder, **{name: value})


def test_arguments_of_the_wrong_type_are_named():
    decoder = tiny_decoder()
    engine, other = Engine(decoder), Engine(decoder)
    for prompt, odd in ((None, None), (5, 5), ("text", "t"), ([5, None], None), ([5.0], 5.0), ([True], True)):
        with pytest.raises(ParameterError, match=f"prompt_ids: {odd!r} instead of plain ints in a list"):
            engine.submit(prompt, LONG)
    for ids in (np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5)], [torch.tensor(5)]):
        for submit in (engine.submit, engine.submit_all, lambda ids, params: decoder.generate([ids], params)):
            with pytest.raises(ParameterError, match=r"plain ints.*; give an array's or a tensor's .tolist\(\)"):
                submit(ids, LONG)
    for params in (None, 5, {"max_tokens": 3}):
        for submit in (engine.submit, engine.submit_all):
            with pytest.raises(ParameterError, match=f"params={params}: must be SamplingParams"):
                submit([5], params)
    assert not engine.busy
    request = other.submit([5], LONG)
    for odd in (None, 5, request):
        with pytest.raises(ParameterError, match="no request of this engine; cancel it where it was submitted"):
            engine.cancel(odd)
    assert len([token for chunk in request for token in chunk.token_ids]) == 30


def test_what_was_committed_comes_before_the_error(monkeypatch, caplog):
    decoder = tiny_decoder()
    engine, plain = Engine(decoder), plain_ids(decoder, [[5]])[0]
    request, chunks = engine.submit([5], LONG), []
    monkeypatch.setattr(decoder, "round", None)  # the first token comes in the same step
    with pytest.raises(EngineError, match="TypeError"):
        for chunk in request:
            chunks.append(chunk)
    assert [(chunk.text, chunk.token_ids) for chunk in chunks] == [(chr(256 + plain[0]), plain[:1])]


def test_nothing_is_kept_of_requests_that_have_ended(monkeypatch, caplog):
    caplog.set_level("CRITICAL", "dcoco.engine")
    decoder = tiny_decoder()
    engine = Engine(decoder, max_num_seqs=2)
    for _ in range(2):
        requests = [engine.submit(ids, LONG) for ids in prompts(5)]
        engine.step()
        engine.cancel(requests[0])
        engine.cancel(requests[3])
        with monkeypatch.context() as patch:
            failing_once(patch, decoder)
            engine.step()
        while engine.busy:
            engine.step()
        assert {request.error is None for request in requests} == {True, False}
        seen = [weakref.ref(request) for request in requests]
        del requests
        gc.collect()
        assert [reference() for reference in seen] == [None] * 5


@pytest.mark.parametrize("make", [tiny_decoder, dflash_decoder])
def test_the_memory_it_tells_of_is_what_it_takes(make):
    engine = Engine(make("qwen3"), max_num_seqs=3, max_model_len=50)
    told, batch = engine.memory_bytes, engine.batch
    list(engine.submit([5], LONG))
    state = batch.draft_state
    caches = [batch.cache] + ([state.cache] if make is dflash_decoder else [])
    kept = [store for cache in caches for store in (*cache._keys.values(), *cache._values.values())]
    kept += [batch.history] + ([] if make is dflash_decoder else [state.features])
    assert told == engine.memory_bytes == sum(store.nbytes for store in kept)


def test_prompts_that_wait_for_their_chunk_outlive_a_pass_that_fails(monkeypatch, caplog):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 4)
    decoder = tiny_decoder()
    engine = Engine(decoder, max_num_seqs=2)
    first, second = engine.submit([5] * 10, LONG), engine.submit([6] * 10, LONG)
    failing_once(monkeypatch, decoder)
    engine.step()
    assert first.error is not None and second.error is None


@pytest.mark.parametrize("method", ["plain", "dcoco"])
def test_prompts_run_in_the_pass_of_those_that_decode(monkeypatch, method):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 8)
    decoder, passes = tiny_decoder(eos_ids=[]), []
    given = [[5] * 6, [6] * 20, [7] * 3]
    plain = plain_ids(decoder, given)
    engine = Engine(decoder, method, max_num_seqs=3)
    with decoder.target.layers[0].register_forward_hook(lambda *args: passes.append(1)):
        requests = [engine.submit(given[0], LONG)]
        engine.step()
        assert len(passes) == 2  # nobody decoded yet: a pass for the prompt, and a round's
        requests += [engine.submit(ids, LONG) for ids in given[1:]]
        for step in range(3):
            assert [bool(request.token_ids) for request in requests] == [True, False, False]
            engine.step()
            assert len(passes) == 3 + step
        assert all(request.token_ids for request in requests)
        while engine.busy:
            engine.step()
    assert [request.token_ids for request in requests] == plain


def test_a_budget_that_buys_nothing_verifies_nothing():
    ragged = [[0.99, 1.5, 3.0]]  # dearer, but for a hair at first
    costs = Costs([1], [[1, 2]], [[1.0, 3.0]], ragged, [1], [[0.1]])
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), log_probs=torch.tensor([[0.1, 0.05, 0.02]] * 2).log())
    assert Budget(costs, 4, 4).spend(draft, torch.tensor([3, 0]), 3) == [0, 0]


def test_a_budget_never_buys_beyond_a_limit():
    """Not even where more tokens were measured to be faster."""
    costs = Costs([1], [[1, 2, 9]], [[9.0, 9.0, 9.0]], [[2.0, 1.5, 0.5, 0.5]], [1], [[0.1]])
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), log_probs=torch.tensor([[0.9, 0.5, 0.2]] * 2).log())
    assert Budget(costs, 4, 4).spend(draft, torch.tensor([1, 0]), 3) == [1, 0]


def test_a_chunk_beside_a_row_that_is_nearly_full_is_observed(monkeypatch, caplog):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 50)
    engine = Engine(dflash_decoder("qwen3"), "top1", max_num_seqs=2)
    requests = [engine.submit([5] * 101, LONG), engine.submit([6] * 60, LONG)]
    while engine.busy:
        engine.step()
    assert [request.error for request in requests] == [None, None]
