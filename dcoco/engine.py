"""`Engine`: requests come and go between rounds, one row of the ragged cache each.

Rows in use are always the first R; when a row in the middle ends, the last one takes its place. Prompts are run in
chunks, several rows at a time. All bookkeeping between rounds is on a handful of integers a row, read from the device
once a round.

Shapes: R rows in use, Q tokens a row.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dcoco.detokenizer import Detokenizer
from dcoco.errors import ParameterError
from dcoco.output import PHASES, RequestOutput, RoundTrace, Stats
from drafters.base import DraftState
from verifier.cache import RaggedCache
from verifier.processors import Processors, TokenCounts, has_penalty
from verifier.sampling import SamplingBatch, SamplingParams, best_logprobs, draw, probabilities
from verifier.target import PREFILL_CHUNK

if TYPE_CHECKING:
    from dcoco.decoder import DCOCODecoder, Method


class Request:
    """One prompt on its way: what was asked for, and what has been committed."""

    def __init__(
        self, prompt_ids: list[int], params: SamplingParams, limit: int, detokenizer: Detokenizer, trace: bool
    ):
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = random.getrandbits(63) if params.seed is None else params.seed
        self.limit = limit  # new tokens at most
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.stats = Stats()
        self.trace: list[RoundTrace] | None = [] if trace else None
        self.output: RequestOutput | None = None
        self.begun = 0.0
        self._detokenizer = detokenizer
        self._pending_text = ""
        self._pending_ids: list[int] = []

    def commit(self, token_ids: list[int], eos_ids: frozenset[int]) -> int:
        """Append tokens until one ends the request; returns how many were taken."""
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            stops = self.params.stop_token_ids or ()
            ended = token in stops or (token in eos_ids and not self.params.ignore_eos)
            text = "" if ended else self._detokenizer.push(token)
            if ended or self._detokenizer.stopped or len(self.token_ids) == self.limit:
                text += self._detokenizer.finish()
                self._hand_out(text, token)
                self._finish("stop" if ended or self._detokenizer.stopped else "length")
                return count
            self._hand_out(text, token)
        return len(token_ids)

    def note_logprobs(self, found: Any, row: int, count: int) -> None:
        """Keep the log-probabilities of the first `count` tokens of a row, from `best_logprobs`."""
        if self.logprobs is None or self.params.logprobs is None:
            return
        ids, values = found
        for token_ids, token_values in zip(ids[row][:count], values[row][:count], strict=True):
            wanted = slice(self.params.logprobs + 1)
            self.logprobs.append(dict(zip(token_ids[wanted], token_values[wanted], strict=True)))

    def take(self) -> tuple[str, list[int]]:
        """Text and tokens since the last call."""
        taken = self._pending_text, self._pending_ids
        self._pending_text, self._pending_ids = "", []
        return taken

    def result(self) -> RequestOutput:
        """The finished output."""
        assert self.output is not None, "the request has not finished"
        return self.output

    def _hand_out(self, text: str, token: int) -> None:
        self._pending_text += text
        self._pending_ids.append(token)

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.stats.seconds = time.perf_counter() - self.begun
        text = self._detokenizer.text
        self.output = RequestOutput(
            self.prompt_ids, self.token_ids, text, reason, self.stats, self.trace, self.logprobs
        )


class Batch:
    """The rows that decode together: tensors for the round, and the cache that they share."""

    def __init__(self, method: "Method", cache: RaggedCache, draft_state: DraftState | None):
        self.method = method
        self.cache = cache
        self.draft_state = draft_state
        self.history = torch.zeros(cache.rows, cache.max_length, dtype=torch.int64, device=cache.device)  # the text
        self.requests: list[Request] = []
        self.anchors: Tensor = torch.empty(0, dtype=torch.int64, device=cache.device)  # [R]
        self.sampling = SamplingBatch.stack([], [], cache.device)
        self.processors: Processors | None = None
        self.counts: TokenCounts | None = None  # allocated for the first request with a penalty
        self.logprobs_wanted: int | None = None  # the most that a request wants
        self.logprobs: Any = None  # of the last round's tokens, where they are wanted
        self.lattice_ids: Tensor | None = None  # [R, n, K] of the last round, for traces
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # of the last round

    def positions(self, count: int) -> Tensor:
        """Absolute positions [R, count] of the tokens behind the anchors."""
        anchors = torch.tensor(self.cache.lengths[: len(self.requests)], device=self.cache.device)
        return anchors[:, None] + torch.arange(1, count + 1, device=self.cache.device)

    def text(self) -> Tensor:
        """The rows' tokens by position, int64 [R, longest]: prompt and answer up to the anchor, then anything."""
        rows = len(self.requests)
        return self.history[:rows, : max(self.cache.lengths[:rows]) + 1]

    def remember(self, positions: Tensor, tokens: Tensor) -> None:
        """Note tokens [R, n] of all rows; like the cache, what is not committed is overwritten by the next round."""
        self.history[: len(self.requests)].scatter_(1, positions[:, : tokens.shape[1]], tokens)

    def move(self, source: int, target: int) -> None:
        """Make row `target` a copy of row `source`."""
        self.cache.move(source, target)
        self.history[target] = self.history[source]
        if self.counts is not None:
            self.counts.move(source, target)
        if self.draft_state is not None:
            self.draft_state.move(source, target)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Note the time of a phase of the round (host time: on a GPU, of launching it)."""
        begun = time.perf_counter()
        yield
        self.phase_seconds[phase] = time.perf_counter() - begun


class Engine:
    """Continuous batching over one decoder.

    Args:
        decoder: the models and the round.
        rows: requests that decode at once; further ones wait in order.
        max_length: tokens of prompt and answer that one request may have.
    """

    def __init__(self, decoder: "DCOCODecoder", method: "Method", rows: int, max_length: int, trace: bool = False):
        self.decoder = decoder
        self.target = decoder.target
        self.drafter = decoder.drafter if method != "plain" else None
        self.max_length = min(max_length, self.target.max_positions)
        self.trace = trace
        self.rows = rows
        self.waiting: deque[Request] = deque()
        self.block = self.drafter.block_size if self.drafter else 0
        branches = self.drafter is not None and decoder.branches(method)
        self.reach = decoder.tree_size if branches else self.block  # tokens that a draft may reach beyond the anchor
        room = self.max_length + 1 + max(self.block, self.reach)
        state = self.drafter.start(rows, room) if self.drafter else None
        self.batch = Batch(method, RaggedCache(rows, room, self.target.device), state)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.batch.requests)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            ParameterError: an empty prompt, ids outside the vocabulary, or a prompt that leaves no room for a token.
        """
        ids = list(prompt_ids)
        if not ids:
            raise ParameterError("the prompt has no tokens; give at least one (a beginning-of-text token will do)")
        vocabulary = self.target.vocab_size
        if biased := [token for token in params.logit_bias or () if token >= vocabulary]:
            raise ParameterError(f"logit_bias names token {biased[0]}; the vocabulary ends at {vocabulary - 1}")
        if stops := [token for token in params.stop_token_ids or () if token >= vocabulary]:
            raise ParameterError(f"stop_token_ids names token {stops[0]}; the vocabulary ends at {vocabulary - 1}")
        wrong = [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]
        if wrong:
            raise ParameterError(
                f"prompt token {wrong[0]!r} is not an id of the model's vocabulary (0..{vocabulary - 1}); where the "
                "tokenizer has more ids, leave those out"
            )
        if len(ids) >= self.max_length:
            raise ParameterError(
                f"the prompt has {len(ids)} tokens; prompt and answer may have {self.max_length} together: shorten it"
            )
        limit = min(params.max_tokens, self.max_length - len(ids))
        detokenizer = Detokenizer(self.decoder.tokenizer, params.stop or ())
        request = Request(ids, params, limit, detokenizer, self.trace)
        self.waiting.append(request)
        return request

    def submit_all(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue `params.n` requests for one prompt, with the seeds seed, seed + 1, ... (or any)."""
        seeds = [None if params.seed is None else _wrap(params.seed + index) for index in range(params.n)]
        return [self.submit(prompt_ids, replace(params, n=1, seed=seed)) for seed in seeds]

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit what fits, then decode one round; returns the requests that got tokens (one may stand there twice)."""
        touched = self._admit()
        if self.batch.requests:
            touched += self._round()
        return touched

    def _round(self) -> list[Request]:
        batch, requests = self.batch, list(self.batch.requests)
        lengths = [self._draft_length(row, request) for row, request in enumerate(requests)]
        batch.lattice_ids = None
        verdict = self.decoder.round(batch, lengths)
        counts, columns = [verdict.accepted[:, None], verdict.drafted[:, None]], verdict.tokens.shape[1]
        path = [] if verdict.path is None else [verdict.path]
        read = torch.cat([*counts, verdict.tokens, *path], dim=1).tolist()  # the round's one wait for the device
        anchors, moves = [], []
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
        batch.cache.keep(moves)
        for row, counted in enumerate(read):
            batch.cache.lengths[row] += counted[0] + 1
        batch.anchors = torch.tensor(anchors, device=batch.cache.device)
        self._drop_finished()
        return requests

    def _draft_length(self, row: int, request: Request) -> int:
        """How far the draft may reach: as far as the answer's and the drafter's limits allow."""
        if self.drafter is None:
            return 0
        left = request.limit - len(request.token_ids) - 1  # the round itself adds one token to those accepted
        return max(0, min(self.reach, left, self.drafter.max_positions - self.batch.cache.lengths[row]))

    def _admit(self) -> list[Request]:
        """Run the prompts of waiting requests in free rows; each yields its first token."""
        batch, first = self.batch, len(self.batch.requests)
        fresh = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.rows - first))]
        fresh.sort(key=lambda request: -len(request.prompt_ids))  # the prefill then runs ever fewer rows
        if not fresh:
            return []
        for request in fresh:
            request.begun = time.perf_counter()
        batch.requests += fresh
        for row in range(first, first + len(fresh)):
            batch.cache.lengths[row] = 0
            if batch.draft_state is not None:
                batch.draft_state.reset(row)
        hidden_RH = self._prefill(fresh, first)
        sampling = SamplingBatch.stack([r.params for r in fresh], [r.seed for r in fresh], self.target.device)
        logits = self.target.logits(hidden_RH[:, None])
        positions = torch.tensor([[len(request.prompt_ids)] for request in fresh], device=self.target.device)
        if any(has_penalty(request.params) for request in fresh):
            batch.counts = batch.counts or TokenCounts(self.rows, self.target.vocab_size, self.target.device)
            for row, request in enumerate(fresh, start=first):
                batch.counts.start(row, request.prompt_ids)
        processed = logits
        if processors := self._processors(fresh):
            nothing, itself = positions[:, :0], torch.ones_like(positions, dtype=torch.bool)[..., None]
            processed = processors.apply(logits, positions, batch.counts, first, nothing, itself)
        first_tokens = draw(probabilities(processed, sampling), sampling, positions)[:, 0]
        if batch.counts is not None:
            batch.counts.add(first, first_tokens[:, None], torch.ones_like(first_tokens))
        batch.anchors = torch.cat([batch.anchors, first_tokens])
        batch.history[first : first + len(fresh)].scatter_(1, positions, first_tokens[:, None])
        wanted = [request.params.logprobs for request in fresh if request.params.logprobs is not None]
        found = best_logprobs(logits, first_tokens[:, None], max(wanted)) if wanted else None
        for row, (request, token) in enumerate(zip(fresh, first_tokens.tolist(), strict=True)):
            request.note_logprobs(found, row, 1)
            request.commit([token], self.decoder.eos_ids)
        self._stack_sampling()
        self._drop_finished()
        return fresh

    def _prefill(self, fresh: list[Request], first: int) -> Tensor:
        """Run prompts, longest first, in chunks behind rows `first ..`; returns the last hidden states [R, H]."""
        cache, device = self.batch.cache, self.target.device
        rows = len(fresh)
        ends = [len(request.prompt_ids) for request in fresh]
        ids = torch.zeros(rows, max(ends), dtype=torch.int64)
        for row, request in enumerate(fresh):
            ids[row, : ends[row]] = torch.tensor(request.prompt_ids)
        ids = ids.to(device)
        self.batch.history[first : first + rows, : max(ends)] = ids
        taps = self.drafter.taps if self.drafter else ()
        hidden_RH = torch.zeros(rows, self.target.hidden_size, dtype=self.target.dtype, device=device)
        for start in range(0, max(ends), PREFILL_CHUNK):
            running = sum(end > start for end in ends)  # the first rows: longer prompts come first
            result = self.target.forward(ids[:running, start : start + PREFILL_CHUNK], cache, taps, first)
            counts = [min(end - start, PREFILL_CHUNK) for end in ends[:running]]
            counts_R = torch.tensor(counts, device=device)
            if self.drafter is not None:
                assert self.batch.draft_state is not None
                self.drafter.observe(self.batch.draft_state, first, result.taps, counts_R)
            hidden_RH[:running] = result.hidden[torch.arange(running, device=device), counts_R - 1]
            for row, count in enumerate(counts):
                cache.lengths[first + row] += count
        return hidden_RH

    def _drop_finished(self) -> None:
        """Free the rows of finished requests; the last row in use moves into each gap."""
        batch = self.batch
        finished = [row for row, request in enumerate(batch.requests) if request.output is not None]
        if not finished:
            return
        order = list(range(len(batch.requests)))
        for row in reversed(finished):
            moved = order.pop()
            if row < len(order):
                order[row] = moved
                batch.move(len(order), row)
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
