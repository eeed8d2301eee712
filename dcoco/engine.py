"""`Engine`: requests come and go between rounds, one row of the ragged cache each.

Rows in use are always the first ones: D that decode, then P whose prompts are still being run, in the order in which
they came. When one ends, others take its place. Prompts are run in chunks, so that a long one stalls nobody, and in the
pass that verifies the others' drafts, which reads the weights once for both. All bookkeeping between rounds is on a
handful of integers a row, read from the device once a round.

Shapes: R rows of a pass, Q tokens a row.
"""

import logging
import random
import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcoco.detokenizer import Detokenizer
from dcoco.errors import EngineError, ParameterError, QueueFullError
from dcoco.output import PHASES, Chunk, FinishReason, RequestOutput, RoundTrace, Stats
from drafters.base import DraftState
from verifier.cache import RaggedCache
from verifier.packing import Packing, attention_work
from verifier.processors import Processors, TokenCounts, has_penalty
from verifier.rejection import Verdict
from verifier.sampling import SamplingBatch, SamplingParams, best_logprobs, draw, probabilities
from verifier.target import Block, Pass

if TYPE_CHECKING:
    from dcoco.budget import Budget
    from dcoco.decoder import DCOCODecoder, Method
    from dcoco.lengths import Lengths

PREFILL_CHUNK = 256  # prompt tokens run in a pass, of all arriving requests together

DISORDER = 1.25  # rows are sorted when their order makes attention work so many times more

logger = logging.getLogger(__name__)


class Request:
    """One prompt on its way: what was asked for, and what has been committed.

    Iterating over it yields its chunks and runs the engine until it has finished.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        limit: int,
        detokenizer: Detokenizer,
        engine: "Engine | None" = None,
    ):
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self.limit = limit  # new tokens at most
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.stats = Stats()
        self.trace: list[RoundTrace] | None = [] if engine is not None and engine.trace else None
        self.output: RequestOutput | None = None  # once it has finished
        self.error: EngineError | None = None  # once it has failed
        self.begun = 0.0
        self._engine = engine
        self._detokenizer = detokenizer
        self._pending_text = ""
        self._taken = 0  # tokens handed out

    @property
    def done(self) -> bool:
        """Whether nothing more will come: it has finished, was cancelled, or has failed."""
        return self.output is not None or self.error is not None

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come, one a round; the last one holds the output.

        Where it fails EngineError comes after all that was committed.
        """
        assert self._engine is not None
        while True:
            while not self.done and self._taken == len(self.token_ids):
                self._engine.step()
            if self.error is not None and self._taken == len(self.token_ids):
                raise self.error
            chunk = self.take()
            yield chunk
            if chunk.output is not None:
                return

    def commit(self, token_ids: list[int], eos_ids: frozenset[int]) -> int:
        """Append tokens until one ends the request; returns how many were taken.

        Where the tokenizer can't make text of one, this request fails and no other.
        """
        before = len(self.token_ids)
        try:
            for token in token_ids:
                stops = self.params.stop_token_ids or ()
                ended = token in stops or (token in eos_ids and not self.params.ignore_eos)
                text = "" if ended else self._detokenizer.push(token)
                self.token_ids.append(token)
                self._pending_text += text
                if ended or self._detokenizer.stopped or len(self.token_ids) == self.limit:
                    self._pending_text += self._detokenizer.finish()
                    self.finish("stop" if ended or self._detokenizer.stopped else "length")
                    break
        except Exception as error:
            logger.exception("a token of a request can't become text")
            self.fail(error)
        return len(self.token_ids) - before

    def note_logprobs(self, found: Any, row: int, count: int) -> None:
        """Keep the log-probabilities of the first `count` tokens of a row, from `best_logprobs`."""
        if self.logprobs is None or self.params.logprobs is None:
            return
        ids, values = found
        for token_ids, token_values in zip(ids[row][:count], values[row][:count], strict=True):
            wanted = slice(self.params.logprobs + 1)
            self.logprobs.append(dict(zip(token_ids[wanted], token_values[wanted], strict=True)))

    def take(self) -> Chunk:
        """Text and tokens since the last call."""
        new = slice(self._taken, len(self.token_ids))
        logprobs = None if self.logprobs is None else self.logprobs[new]
        chunk = Chunk(self._pending_text, self.token_ids[new], self.output, logprobs)
        self._pending_text, self._taken = "", len(self.token_ids)
        return chunk

    def result(self) -> RequestOutput:
        """The finished output; raises EngineError where the request has failed."""
        if self.error is not None:
            raise self.error
        assert self.output is not None, "the request has not finished"
        return self.output

    def fail(self, error: BaseException) -> None:
        """Nothing more will come. The error itself is not kept: its traceback holds all that the pass computed."""
        self.error = EngineError(f"the request failed: {error!r}; send it again")

    def finish(self, reason: FinishReason) -> None:
        """Nothing more will come; what has been committed is the output."""
        self.stats.seconds = time.perf_counter() - self.begun if self.begun else 0.0
        text = self._detokenizer.text
        self.output = RequestOutput(
            self.prompt_ids, self.token_ids, text, reason, self.stats, self.trace, self.logprobs
        )


class Batch:
    """The rows that decode together: tensors for the round, and the cache that they share."""

    def __init__(
        self,
        method: "Method",
        cache: RaggedCache,
        draft_state: DraftState | None,
        budget: "Budget | Lengths | None" = None,
    ):
        self.method = method
        self.cache = cache
        self.draft_state = draft_state
        self.budget = budget  # None: drafts are verified as far as the decoder's tree_size and worth allow
        self.history = torch.zeros(cache.rows, cache.max_length, dtype=torch.int64, device=cache.device)  # the text
        self.requests: list[Request] = []
        self.anchors: Tensor = torch.empty(0, dtype=torch.int64, device=cache.device)  # [R]
        self.sampling = SamplingBatch.stack([], [], cache.device)
        self.processors: Processors | None = None
        self.counts: TokenCounts | None = None  # allocated for the first request with a penalty
        self.logprobs_wanted: int | None = None  # the most that a request wants
        self.logprobs: Any = None  # of the last round's tokens, where they are wanted
        self.lattice_ids: Tensor | None = None  # [R, n, K] of the last round, for traces
        self.drafted_slots = 0  # in the last round
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # of the last round

    def positions(self, count: int) -> Tensor:
        """Absolute positions [R, count] of the tokens behind the anchors."""
        anchors = torch.tensor(self.cache.lengths[: len(self.requests)], device=self.cache.device)
        return anchors[:, None] + 1 + self.steps(count)

    def steps(self, count: int) -> Tensor:
        """0, 1, ... count - 1."""
        return torch.arange(count, device=self.cache.device)

    def text(self) -> Tensor:
        """The rows' tokens by position, int64 [R, longest]: prompt and answer up to the anchor, then anything."""
        rows = len(self.requests)
        return self.history[:rows, : max(self.cache.lengths[:rows]) + 1]

    def remember(self, tokens: Tensor) -> None:
        """Note tokens [R, n] behind the anchors; like the cache, what is not committed is overwritten later."""
        self.history[: len(self.requests)].scatter_(1, self.positions(tokens.shape[1]), tokens)

    def arrange(self) -> None:
        """Sort the rows by length where that spares attention much: neighbours then look equally far."""
        lengths = self.cache.lengths[: len(self.requests)]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        if attention_work(lengths) < DISORDER * attention_work([lengths[row] for row in order]):
            return
        spare, settled = self.cache.rows - 1, [source == row for row, source in enumerate(order)]
        for first in range(len(order)):
            if settled[first]:
                continue
            self.move(first, spare)
            row = first
            while not settled[row]:
                self.move(spare if order[row] == first else order[row], row)
                settled[row], row = True, order[row]
        self.requests = [self.requests[row] for row in order]
        self.anchors = self.anchors[torch.tensor(order, device=self.anchors.device)]

    def move(self, source: int, target: int) -> None:
        """Make row `target` a copy of row `source`."""
        if source == target:
            return
        self.cache.move(source, target)
        self.history[target] = self.history[source]
        if self.counts is not None:
            self.counts.move(source, target)
        if self.draft_state is not None:
            self.draft_state.move(source, target)

    def reset(self, row: int) -> None:
        """Forget a row."""
        self.cache.lengths[row] = 0
        if self.draft_state is not None:
            self.draft_state.reset(row)

    def clean(self, used: int) -> None:
        """Zero what a failed pass may have left behind the texts of the `used` first rows, and in all other rows."""
        for row in range(used, self.cache.rows):
            self.reset(row)
        self.cache.clean()
        if self.draft_state is not None:
            self.draft_state.clean()

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Note the time of a phase of the round (host time: on a GPU, of launching it)."""
        begun = time.perf_counter()
        yield
        self.phase_seconds[phase] += time.perf_counter() - begun


class Engine:
    """Continuous batching over one decoder. Not for several threads at once: `dcoco/loop.py` gives it one of its own.

    Args:
        decoder: the models and the round.
        method: how to decode.
        max_num_seqs: requests that hold a row at once; further ones wait in order.
        max_model_len: tokens of prompt and answer that one request may have together; by default all that the target's
            positions allow. The cache has room for that many in each row.
        max_waiting: requests that may wait; None: any number.
        trace: keep each round's candidates in `RequestOutput.trace`.

    Raises:
        DrafterError: the method needs a drafter and there is none.
        ParameterError: a method or a size that makes no sense.
    """

    def __init__(
        self,
        decoder: "DCOCODecoder",
        method: "Method" = "dcoco",
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
        trace: bool = False,
    ):
        decoder.check_method(method)
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", 2 if max_model_len is None else max_model_len, 2),  # a prompt and an answer
            ("max_waiting", 0 if max_waiting is None else max_waiting, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ParameterError(f"{name}={value!r}: must be an integer, at least {least}")
        self.decoder = decoder
        self.target = decoder.target
        self.drafter = decoder.drafter if method != "plain" else None
        self.max_num_seqs = max_num_seqs
        self.max_model_len = min(max_model_len or self.target.max_positions, self.target.max_positions)
        self.max_waiting = max_waiting
        self.trace = trace
        self.waiting: deque[Request] = deque()
        self.arriving: list[Request] = []  # rows behind those that decode; their prompts are being run
        self.block = self.drafter.block_size if self.drafter else 0
        self.reach = decoder.reach(method)  # tokens that a draft may go beyond the anchor
        room = self.max_model_len + 1 + max(self.block, self.reach)
        rows = max_num_seqs + 1  # the last one is for changing places
        state = self.drafter.start(rows, room) if self.drafter else None
        cache = RaggedCache(rows, room, self.target.device)
        self.batch = Batch(method, cache, state, decoder.budget(method))
        self._settled = True  # no row is on its way to another place

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.arriving or self.batch.requests)

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self.arriving) + len(self.batch.requests)

    @property
    def memory_bytes(self) -> int:
        """What the cache, the drafter's state and the texts take when all rows are full."""
        cache, state, history = self.batch.cache, self.batch.draft_state, self.batch.history
        drafters = 0 if state is None else state.memory_bytes
        return cache.rows * cache.max_length * self.target.cache_bytes_per_token + drafters + history.nbytes

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request; `params.n` is for `submit_all`.

        Raises:
            ParameterError: an empty prompt, ids outside the vocabulary, a prompt that leaves no room for a token, an
                argument of the wrong type, `params.n` other than 1, or (`submit_all`) more answers than there may ever
                be at once.
            QueueFullError: as many requests wait as may wait.
        """
        self._check(prompt_ids, params)
        if params.n != 1:
            raise ParameterError(f"n={params.n}: submit() takes one request; submit_all() takes n of them")
        self._check_room(1)
        return self._queue(prompt_ids, [params])[0]

    def submit_all(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue `params.n` requests for one prompt, with the seeds seed, seed + 1, ... (or any); all or none."""
        self._check(prompt_ids, params)
        self._check_room(params.n)
        seeds = [None if params.seed is None else _wrap(params.seed + index) for index in range(params.n)]
        return self._queue(prompt_ids, [replace(params, n=1, seed=seed) for seed in seeds])

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request where it stands and free its row; nothing happens if it has ended.

        Raises:
            ParameterError: it's no request of this engine.
        """
        if getattr(request, "_engine", None) is not self:
            raise ParameterError(f"cancel({request!r}): no request of this engine; cancel it where it was submitted")
        if request.done:
            return
        with self._rearranging():
            request.finish("cancelled")
            if request in self.waiting:
                self.waiting.remove(request)
            self._free_rows()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Decode one round, with a chunk of the arriving prompts in its pass; returns the requests that got something.

        Where nobody decodes yet the prompts come before the round: one that gets its first token and more in the same
        step stands there twice. When a pass fails, the requests in it fail with an EngineError and the engine goes on
        with the others; so it does when Ctrl-C ends a step.
        """
        touched = [] if self._settled else self._fail([], RuntimeError("interrupted while rows changed places"))
        touched += self._admit()
        counts = self._next_chunk()
        if not self.batch.requests:
            touched += self._attempt(partial(self._prefill, counts), self.arriving[: len(counts)])
            counts = []
        taking_part = self.batch.requests + self.arriving[: len(counts)]
        return touched + self._attempt(partial(self._round, counts), taking_part)

    def _attempt(self, work: Callable[[], list[Request]], requests: list[Request]) -> list[Request]:
        taking_part = list(requests)
        if not taking_part:
            return []
        try:
            return work()
        except Exception as error:
            logger.exception("%d requests failed", len(taking_part))
            return self._fail(taking_part, error)
        except BaseException as error:  # Ctrl-C, say
            self._fail(taking_part, error)
            raise

    @contextmanager
    def _rearranging(self) -> Iterator[None]:
        """Rows change places: whatever ends this early leaves none that can be trusted."""
        before, self._settled = self._settled, False
        yield
        self._settled = before

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params={params!r}: must be SamplingParams")
        is_list = isinstance(prompt_ids, Sequence)
        if odd := [token for token in prompt_ids if type(token) is not int] if is_list else [prompt_ids]:
            raise ParameterError(
                f"prompt_ids: {reprlib.repr(odd[0])} instead of plain ints in a list; give an array's or a tensor's "
                ".tolist(), and encode text first"
            )
        if not prompt_ids:
            raise ParameterError("the prompt has no tokens; give at least one (a beginning-of-text token will do)")
        vocabulary = self.target.vocab_size
        if biased := [token for token in params.logit_bias or () if token >= vocabulary]:
            raise ParameterError(f"logit_bias names token {biased[0]}; the vocabulary ends at {vocabulary - 1}")
        if stops := [token for token in params.stop_token_ids or () if token >= vocabulary]:
            raise ParameterError(f"stop_token_ids names token {stops[0]}; the vocabulary ends at {vocabulary - 1}")
        if wrong := [token for token in prompt_ids if not 0 <= token < vocabulary]:
            raise ParameterError(
                f"prompt token {wrong[0]} is not an id of the model's vocabulary (0..{vocabulary - 1}); where the "
                "tokenizer has more ids, leave those out"
            )
        if len(prompt_ids) >= self.max_model_len:
            raise ParameterError(
                f"the prompt has {len(prompt_ids)} tokens; prompt and answer may have {self.max_model_len} together: "
                "shorten it"
            )

    def _check_room(self, count: int) -> None:
        """Raise where so many requests more can't be held, now or ever."""
        if self.max_waiting is None:
            return
        most = self.max_num_seqs + self.max_waiting
        if count > most:
            raise ParameterError(
                f"n={count}: {most} answers are the most at once, as max_num_seqs={self.max_num_seqs} run and "
                f"max_waiting={self.max_waiting} wait; ask for fewer"
            )
        if self.running + len(self.waiting) + count > most:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already and {self.max_waiting} may: try again later"
            )

    def _queue(self, prompt_ids: Sequence[int], each: list[SamplingParams]) -> list[Request]:
        room, requests = self.max_model_len - len(prompt_ids), []
        for params in each:
            text = Detokenizer(self.decoder.tokenizer, params.stop or (), params.min_tokens)
            requests.append(Request(list(prompt_ids), params, min(params.max_tokens, room), text, self))
        self.waiting += requests
        return requests

    def _admit(self) -> list[Request]:
        """Give free rows to waiting requests; returns those that this failed for."""
        failed = []
        while self.waiting and self.running < self.max_num_seqs:
            request = self.waiting[0]
            if request.done:  # Ctrl-C came before it was taken off
                self.waiting.popleft()
            else:
                failed += self._attempt(partial(self._seat, request), [request])
        return failed

    def _seat(self, request: Request) -> list[Request]:
        """Give the first free row to the first waiting request, which has got nothing yet."""
        batch, row = self.batch, self.running
        self.arriving.append(request)
        self.waiting.popleft()
        request.begun = time.perf_counter()
        batch.reset(row)
        batch.history[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids, device=self.target.device)
        if has_penalty(request.params):
            if batch.counts is None:
                batch.counts = TokenCounts(batch.cache.rows, self.target.vocab_size, self.target.device)
            batch.counts.start(row, request.prompt_ids)
        return []

    def _next_chunk(self) -> list[int]:
        """Tokens to run of each of the first arriving prompts, first come first served."""
        room, counts = PREFILL_CHUNK, []
        for row, request in enumerate(self.arriving, start=len(self.batch.requests)):
            if room == 0:
                break
            counts.append(min(room, len(request.prompt_ids) - self.batch.cache.lengths[row]))
            room -= counts[-1]
        return counts

    def _prefill(self, counts: list[int]) -> list[Request]:
        """Run so many tokens of the first arriving prompts; those that end with them yield their first token."""
        prompts = self._prompts(counts)
        taps = self.drafter.taps if self.drafter else ()
        return self._take_in(prompts, counts, self.target.forward_blocks([prompts], self.batch.cache, taps)[0])

    def _prompts(self, counts: list[int]) -> Block:
        """So many tokens of the first arriving prompts."""
        batch, cache, first = self.batch, self.batch.cache, len(self.batch.requests)
        packing = Packing(counts, cache.device, cache.lengths[first : first + len(counts)], slack=1.0)
        starts = torch.tensor(cache.lengths[first : first + len(counts)], device=cache.device)
        columns = (starts[:, None] + batch.steps(packing.queries)).clamp(max=batch.history.shape[1] - 1)
        return Block(batch.history[first : first + len(counts)].gather(1, columns), first, packing=packing)

    def _take_in(self, prompts: Block, counts: list[int], result: Pass) -> list[Request]:
        """Note what a pass made of the prompts' tokens; those that end with them yield their first token."""
        batch, cache, first, packing = self.batch, self.batch.cache, prompts.first, prompts.packing
        assert packing is not None
        counts_R = torch.tensor(counts, device=cache.device)
        if self.drafter is not None and batch.draft_state is not None:
            unpacked = [packing.unpack(tap.flatten(0, 1)) for tap in result.taps]
            self.drafter.observe(batch.draft_state, first, unpacked, counts_R)
        for row, count in enumerate(counts, start=first):
            cache.lengths[row] += count
        last_RH = result.hidden.flatten(0, 1)[packing.find(counts_R[:, None] - 1)[:, 0]]
        ready = sum(cache.lengths[first + i] == len(self.arriving[i].prompt_ids) for i in range(len(counts)))
        with self._rearranging():
            self._free_rows()  # of those that ended in the same pass: rows are sorted without them
        return self._begin(ready, last_RH[:ready]) if ready else []

    def _begin(self, ready: int, hidden: Tensor) -> list[Request]:
        """The first `ready` arriving requests decode from now on; their first tokens, from hidden states [ready, H]."""
        batch, first = self.batch, len(self.batch.requests)
        fresh = self.arriving[:ready]
        sampling = SamplingBatch.stack([r.params for r in fresh], [r.seed for r in fresh], self.target.device)
        logits = self.target.logits(hidden)
        places = batch.steps(ready)
        positions = torch.tensor([len(request.prompt_ids) for request in fresh], device=self.target.device)
        processed = logits
        if processors := self._processors(fresh):
            nothing, itself = positions[:, None][:, :0], torch.ones(ready, 1, 1, dtype=torch.bool, device=logits.device)
            processed = processors.apply(logits, places, positions, batch.counts, first, nothing, itself)
        first_tokens = draw(probabilities(processed[:, None], sampling), sampling, positions[:, None])
        if batch.counts is not None:
            batch.counts.add(first, first_tokens, torch.ones_like(positions))
        batch.history[first : first + ready].scatter_(1, positions[:, None], first_tokens)
        wanted = [request.params.logprobs for request in fresh if request.params.logprobs is not None]
        found = best_logprobs(logits[:, None], first_tokens, max(wanted)) if wanted else None
        for row, (request, token) in enumerate(zip(fresh, first_tokens[:, 0].tolist(), strict=True)):
            request.stats.prefill_seconds = time.perf_counter() - request.begun
            request.note_logprobs(found, row, request.commit([token], self.decoder.eos_ids))
        with self._rearranging():
            self.arriving = self.arriving[ready:]
            batch.requests += fresh
            batch.anchors = torch.cat([batch.anchors, first_tokens[:, 0]])
            batch.arrange()
            self._stack_sampling()
            self._free_rows()
        return fresh

    def _round(self, counts: list[int]) -> list[Request]:
        """Decode a round, with so many tokens of the first arriving prompts in its pass."""
        begun, batch, requests = time.perf_counter(), self.batch, list(self.batch.requests)
        lengths = [self._draft_length(row, request) for row, request in enumerate(requests)]
        prompts = self._prompts(counts) if counts else None
        verdict, result = self.decoder.round(batch, lengths, prompts)
        verified, accepted = self._commit(requests, lengths, verdict)
        if batch.budget is not None:
            seconds = None if prompts else time.perf_counter() - begun
            batch.budget.learn(batch.drafted_slots, verified, accepted, seconds)
        fresh = [] if prompts is None or result is None else self._take_in(prompts, counts, result)
        with self._rearranging():
            self._free_rows()
        return requests + fresh

    def _commit(
        self, requests: list[Request], lengths: list[int], verdict: Verdict
    ) -> tuple[list[int], list[list[int]]]:
        """Hand out what a round has decided, and make it count.

        Returns how many drafted tokens of each row were verified, and which of them were accepted.
        """
        batch, columns = self.batch, verdict.tokens.shape[1]
        counts = [verdict.accepted[:, None], verdict.drafted[:, None]]
        path = [] if verdict.path is None else [verdict.path]
        read = torch.cat([*counts, verdict.tokens, *path], dim=1).tolist()  # the round's wait for the device
        anchors, moves, nodes = [], [], []
        for row, request in enumerate(requests):
            accepted, drafted, *rest = read[row]
            tokens, queries = rest[: accepted + 1], rest[columns : columns + accepted + 1]
            start = len(request.token_ids)
            taken = request.commit(tokens, self.decoder.eos_ids)
            request.note_logprobs(batch.logprobs, row, taken)
            request.stats.count(drafted, lengths[row], min(accepted, taken), taken, batch.phase_seconds)
            if request.trace is not None:
                lattice = batch.lattice_ids
                candidates = None if lattice is None else lattice[row, : lengths[row]].clone()
                request.trace.append(RoundTrace(start, taken, min(accepted, taken), candidates))
            moves += [(row, query, place) for place, query in enumerate(queries) if query != place]
            anchors.append(tokens[-1])
            nodes.append([query - 1 for query in queries[1:]] if path else list(range(accepted)))
        batch.cache.keep(moves)
        for row, counted in enumerate(read):
            batch.cache.lengths[row] += counted[0] + 1
        batch.anchors = torch.tensor(anchors, device=batch.cache.device)
        return [counted[1] for counted in read], nodes

    def _draft_length(self, row: int, request: Request) -> int:
        """How far the draft may reach: as far as the answer's and the drafter's limits allow."""
        if self.drafter is None:
            return 0
        left = request.limit - len(request.token_ids) - 1  # the round itself adds one token to those accepted
        return max(0, min(self.reach, left, self.drafter.max_positions - self.batch.cache.lengths[row]))

    def _fail(self, requests: list[Request], error: BaseException) -> list[Request]:
        """End requests whose pass has failed, and where rows were changing places all that hold one; returns them."""
        if not self._settled:
            others = [request for request in self.batch.requests + self.arriving if request not in requests]
            requests = requests + [request for request in others if not request.done]
        with self._rearranging():
            for request in requests:
                if not request.done:
                    request.fail(error)
            self._free_rows()
            self.batch.clean(self.running)
        self._settled = True
        return requests

    def _free_rows(self) -> None:
        """Take ended requests off their rows: the last decoding one fills the gap, arriving ones move up."""
        batch = self.batch
        order = list(range(len(batch.requests)))  # which of the rows each remaining one comes from
        for row in reversed([row for row, request in enumerate(batch.requests) if request.done]):
            moved = order.pop()
            if row < len(order):
                order[row] = moved
                batch.move(len(order), row)
        staying = [row for row, request in enumerate(self.arriving, start=len(batch.requests)) if not request.done]
        for place, row in enumerate(staying, start=len(order)):
            batch.move(row, place)
        self.arriving = [request for request in self.arriving if not request.done]
        if len(order) < len(batch.requests):
            batch.requests = [batch.requests[index] for index in order]
            batch.anchors = batch.anchors[torch.tensor(order, dtype=torch.int64, device=batch.anchors.device)]
            self._stack_sampling()

    def _stack_sampling(self) -> None:
        requests = self.batch.requests
        params, seeds = [r.params for r in requests], [r.seed for r in requests]
        self.batch.sampling = SamplingBatch.stack(params, seeds, self.target.device)
        self.batch.processors = self._processors(requests)
        self.batch.logprobs_wanted = max((p.logprobs for p in params if p.logprobs is not None), default=None)

    def _processors(self, requests: list[Request]) -> Processors | None:
        params, lengths = [r.params for r in requests], [len(r.prompt_ids) for r in requests]
        return Processors.stack(params, lengths, list(self.decoder.eos_ids), self.target.device)


def _wrap(seed: int) -> int:
    """A seed as an int64, going round at the end of its range."""
    return (seed + 2**63) % 2**64 - 2**63
