"""`DCOCODecoder`: a target, its drafter and corrector, and the round that they decode in.

    decoder = DCOCODecoder.from_pretrained("smollm2_135m")
    output = decoder.generate("Why is the sky blue?", SamplingParams(max_tokens=64))[0]

Shapes: R rows, n drafted slots, V vocabulary.
"""

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.budget import Budget
from dcoco.corrector import Scores
from dcoco.costs import find_costs
from dcoco.engine import Batch, Engine
from dcoco.errors import DrafterError, ParameterError
from dcoco.lengths import Lengths
from dcoco.output import PHASES, Chunk, RequestOutput
from dcoco.recall import recall
from dcoco.registry import AnyCorrector, load_corrector
from dcoco.targets import drafter_folder, load_target, resolve_drafter
from dcoco.tree import grow
from dcoco.walk import walk
from drafters.base import Context, Draft, Drafter
from drafters.prompt_lookup import Continuation, continuation
from drafters.registry import load_drafter
from verifier.packing import Packing
from verifier.rejection import Verdict, verify_match, verify_one_hot, verify_sampled, verify_tree
from verifier.sampling import SamplingParams, best_logprobs, draw, probabilities
from verifier.target import Block, Pass, Target

Method = Literal["dcoco", "walk", "top1", "plain"]
Rule = Literal["match", "one_hot", "sampled"]
METHODS = ("dcoco", "walk", "top1", "plain")
RULES = ("match", "one_hot", "sampled")
NO_DRAFTER = "none"
TREE_SIZE = 23
WORTH = 0.08  # on two cores, SmolLM2-135M: one more token costs 2 % of a round that commits 4
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


class DCOCODecoder:
    """Decodes prompts several times faster than the target alone, with the target's own distribution.

    Args:
        target, tokenizer: the model whose output is preserved.
        drafter: proposes blocks; None allows `method="plain"` only.
        corrector: finds coherent paths through the drafter's candidates; None makes every draft the "top1".
        eos_ids: tokens that end an answer.
        rule: how drafts are verified above temperature 0; all three keep the distribution exactly, and `match` also
            keeps the very text that plain sampling gives with the same seed.
        max_rows: prompts decoded at once; further ones wait.
        tree_size: tokens of a draft that method "dcoco" submits at most, the most probable ones of all paths. The rules
            one_hot and sampled verify a single path and ignore it.
        worth: how probable such a token must be to be submitted, unless `adaptive`. Good is (time of one more token in
            a target pass) / (time of a round) x acceptance length.
        recall: let the corrector see how the text went on the last time it looked like this.
        adaptive: choose in each round how much is drafted and verified by what it costs on this machine and load
            (`dcoco/budget.py`; under rule sampled `dcoco/lengths.py`). What it costs is measured when first needed.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafter: Drafter | None = None,
        corrector: AnyCorrector | None = None,
        eos_ids: Sequence[int] = (),
        rule: Rule = "match",
        max_rows: int = 32,
        tree_size: int = TREE_SIZE,
        worth: float = WORTH,
        recall: bool = True,
        adaptive: bool = False,
    ):
        for name, value in (("tree_size", tree_size), ("max_rows", max_rows)):
            if type(value) is not int or value < 1:
                raise ParameterError(f"{name}={value!r}: must be an integer, at least 1")
        if isinstance(worth, bool) or not isinstance(worth, int | float) or not 0.0 <= worth < 1.0:
            raise ParameterError(f"worth={worth!r}: must be a probability from 0 to below 1")
        if rule not in RULES:
            raise ParameterError(f"rule={rule!r}: must be one of {', '.join(RULES)}")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.corrector = corrector
        with torch.inference_mode():
            embedding = target.embedding_weight()
            self.token_table = None if corrector is None else corrector.token_table(embedding)  # [V, D]
        self.eos_ids = frozenset(index for index in eos_ids if index < target.vocab_size)  # a tokenizer may have more
        self.rule = rule
        self.max_rows = max_rows
        self.tree_size = tree_size
        self.worth = worth
        self.recall = recall
        self.adaptive = adaptive
        self._budgets: dict[Method, Budget | Lengths] = {}  # they learn from one call to the next

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        rule: Rule = "match",
        max_rows: int = 32,
        tree_size: int = TREE_SIZE,
        worth: float = WORTH,
        recall: bool = True,
        adaptive: bool = True,
    ) -> "DCOCODecoder":
        """Load a target by name (conf/target), folder, hub id or GGUF file, with its default or the given drafter
        (a name in conf/drafter, a folder, a hub id; "none" for plain decoding only).

        `dtype=None` is bfloat16 where the device multiplies it natively, else float32. Raises TargetError,
        DrafterError, FetchError or ConfigError.
        """
        model, tokenizer, source = load_target(target, dtype=dtype, device=device)
        wrapped = Target(model)
        loaded: Drafter | None = None
        corrector = None
        name = drafter or source.drafter
        if name and name != NO_DRAFTER:
            folder = drafter_folder(resolve_drafter(name))
            loaded = load_drafter(folder, wrapped, tokenizer)
            corrector = load_corrector(folder, wrapped)
        eos_ids = _eos_ids(model, tokenizer)
        return cls(wrapped, tokenizer, loaded, corrector, eos_ids, rule, max_rows, tree_size, worth, recall, adaptive)

    # ------------------------------------------------------------------------------------------------ the round

    @torch.inference_mode()
    def round(self, batch: Batch, lengths: list[int], prompts: Block | None = None) -> tuple[Verdict, Pass | None]:
        """Draft, correct, verify: one target pass that commits between 1 and n + 1 tokens a row.

        Row r's draft reaches at most `lengths[r]` tokens beyond its anchor; with all of them 0 this is plain decoding.
        `prompts` are tokens of the rows behind these that run in the same pass, whose result comes second.
        """
        device = batch.cache.device
        batch.phase_seconds = dict.fromkeys(PHASES, 0.0)
        draft, slots = self.propose(batch, lengths)
        with batch.clock("verify"):
            counts = self._spend(batch, draft, lengths, slots)
            verified = draft if draft.q is not None else draft.first(counts)
            contexts = batch.cache.lengths[: len(counts)]
            packing = Packing([count + 1 for count in counts], device, contexts)
            ids = torch.cat([batch.anchors[:, None], verified.tokens], dim=1)
            taps = self.drafter.taps if self.drafter and batch.method != "plain" else ()
            blocks = [Block(ids, 0, verified.tree, packing), *([prompts] if prompts else [])]
            result, *beside = self.target.forward_blocks(blocks, batch.cache, taps)
            logits_TV = self.target.logits(result.hidden.flatten(0, 1))
            verdict = self._verify(batch, logits_TV, verified, counts, packing)
            spots_Rn = packing.find(verdict.path if verdict.path is not None else batch.steps(verdict.tokens.shape[1]))
            batch.remember(verdict.tokens)
            if batch.counts is not None:
                batch.counts.add(0, verdict.tokens, verdict.accepted + 1)
            if batch.logprobs_wanted is not None:
                batch.logprobs = best_logprobs(logits_TV[spots_Rn], verdict.tokens, batch.logprobs_wanted)
            if batch.draft_state is not None and self.drafter is not None:
                committed = [tap.flatten(0, 1)[spots_Rn] for tap in result.taps]
                self.drafter.observe(batch.draft_state, 0, committed, verdict.accepted + 1)
        batch.drafted_slots = slots
        return verdict, beside[0] if beside else None

    def branches(self, method: Method) -> bool:
        """Whether drafts are trees."""
        return method == "dcoco" and self.rule == "match" and self.corrector is not None

    def reach(self, method: Method) -> int:
        """How many tokens beyond the anchor a draft may go."""
        if method == "plain" or self.drafter is None:
            return 0
        return self.tree_size if self.branches(method) else self.drafter.block_size

    def budget(self, method: Method) -> Budget | Lengths | None:
        """The verification budget of a method; None where drafts are always verified as far as they reach."""
        if not self.adaptive or method == "plain" or self.drafter is None:
            return None
        if method not in self._budgets:
            costs, block = find_costs(self, method, self.max_rows), self.drafter.block_size
            sampled = self.rule == "sampled"  # what was drawn must not decide then
            self._budgets[method] = Lengths(costs, block) if sampled else Budget(costs, block, self.reach(method))
        return self._budgets[method]

    def propose(self, batch: Batch, lengths: list[int]) -> tuple[Draft, int]:
        """What to verify behind all anchors, no further than `lengths`, and how many slots were drafted for it."""
        batch.lattice_ids = None
        nothing = batch.anchors.new_empty(len(batch.anchors), 0)
        if self.drafter is None or batch.draft_state is None or not max(lengths):
            return Draft(nothing), 0
        text, budget, limits = batch.text(), batch.budget, torch.tensor(lengths, device=batch.cache.device)
        found = Continuation(nothing, batch.anchors)
        with batch.clock("correct"):
            if self.recall and self.corrector is not None and self.corrector.recalls and batch.method != "top1":
                found = continuation(text, batch.positions(1)[:, 0] - 1, max(lengths))
            recalled = found.draft()
        slots = min(max(lengths), self.drafter.block_size if budget is None else budget.slots(recalled, limits))
        if slots == 0:
            return recalled, 0
        with batch.clock("draft"):
            ahead, sampled = batch.positions(slots), self.rule == "sampled"
            context = Context(text, ahead, batch.sampling, sampled)
            lattice = self.drafter.draft(batch.draft_state, batch.anchors, batch.cache, slots, context)
        if isinstance(lattice, Draft):
            return lattice, slots
        with batch.clock("correct"):
            batch.lattice_ids = lattice.ids
            if batch.method == "top1" or self.corrector is None or self.token_table is None:
                return walk(lattice, Scores.unary(lattice), batch.sampling, ahead, sampled), slots
            on_lattice = None
            if self.recall and self.corrector.recalls:
                lattice, on_lattice = recall(lattice, found)
                batch.lattice_ids = lattice.ids
            scores = self.corrector(lattice, self.token_table, on_lattice)
            if not self.branches(batch.method):
                return walk(lattice, scores, batch.sampling, ahead, sampled), slots
            worth = 0.0 if budget else self.worth
            return grow(lattice, scores, batch.sampling, ahead, limits, self.tree_size, on_lattice, worth), slots

    def _spend(self, batch: Batch, draft: Draft, lengths: list[int], slots: int) -> list[int]:
        """How many tokens of each row's draft are verified."""
        if draft.counts is not None:
            lengths = [min(pair) for pair in zip(lengths, draft.counts.tolist(), strict=True)]
        if batch.budget is not None and (draft.log_probs is not None or self.rule == "sampled"):
            return batch.budget.spend(draft, torch.tensor(lengths, device=draft.tokens.device), slots)
        if draft.tree is not None:
            return draft.tree.valid.sum(-1).tolist()
        return [min(length, draft.tokens.shape[1]) for length in lengths]

    def _verify(self, batch: Batch, logits_TV: Tensor, draft: Draft, counts: list[int], packing: Packing) -> Verdict:
        """The target's own tokens (or p) at every query, held against the draft."""
        queries = draft.tokens.shape[1] + 1
        if draft.tree is None:
            positions_RQ = batch.positions(queries)
        else:
            positions_RQ = batch.positions(1) + draft.tree.depths
        lengths = torch.tensor(counts, device=logits_TV.device)
        if batch.processors is not None:
            chain = torch.ones(queries, queries, dtype=torch.bool, device=logits_TV.device).tril()
            sees = chain.expand(len(counts), -1, -1) if draft.tree is None else draft.tree.sees
            positions_T = packing.pack(positions_RQ)
            logits_TV = batch.processors.apply(
                logits_TV, packing.index, positions_T, batch.counts, 0, draft.tokens, sees
            )
        if batch.sampling.all_greedy:
            y_T = logits_TV.max(-1).indices  # argmax takes four times as long
        else:
            each = batch.sampling.spread(packing.index // queries)
            p_T1V = probabilities(logits_TV[:, None], each)
            if self.rule == "match":
                y_T = draw(p_T1V, each, packing.pack(positions_RQ)[:, None])[:, 0]
            else:
                p_RQV = packing.unpack(p_T1V[:, 0])
                if draft.candidates is not None and draft.q is not None:
                    q = (draft.candidates, draft.q)
                    return verify_sampled(p_RQV, draft.tokens, lengths, *q, batch.sampling, positions_RQ)
                return verify_one_hot(p_RQV, draft.tokens, lengths, batch.sampling, positions_RQ)
        y_RQ = packing.unpack(y_T)
        if draft.tree is not None:
            return verify_tree(y_RQ, draft.tokens, draft.tree, queries - 1)
        return verify_match(y_RQ, draft.tokens, lengths)

    # ------------------------------------------------------------------------------------------------ public face

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        method: Method = "dcoco",
        trace: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts: each a string (completed as it is), token ids, or chat messages (through the chat template).

        Args:
            params: for all prompts, or one a prompt; greedy with 256 tokens by default.
            method: "dcoco" (the best nodes of the corrected lattice), "walk" (its best path only), "top1" (the
                drafter's own best candidates) or "plain" (no drafting).
            trace: keep each round's candidates in `RequestOutput.trace`.
            progress: show a progress bar.

        Raises:
            ParameterError: an empty or too long prompt, ids outside the vocabulary, a wrong argument.
        """
        prompt_ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        each = [params or SamplingParams()] * len(prompt_ids) if _is_one(params) else _checked_params(params)
        if len(each) != len(prompt_ids):
            raise ParameterError(f"params: {len(each)} given for {len(prompt_ids)} prompts; give one, or one a prompt")
        engine = self._engine(prompt_ids, each, method, trace)
        asked = [engine.submit_all(ids, one) for ids, one in zip(prompt_ids, each, strict=True)]
        requests = [request for answers in asked for request in answers]
        with tqdm(total=len(requests), disable=not progress, unit="prompt") as bar:
            while engine.busy:
                bar.update(len({id(request) for request in engine.step() if request.done}))
        for first, *others in asked:
            first.result().others = [other.result() for other in others]
        return [answers[0].result() for answers in asked]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, method: Method = "dcoco", trace: bool = False
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece: a chunk a round, whole characters only; the last one holds the output."""
        if not _is_one(params):
            raise ParameterError(f"params={reprlib.repr(params)}: must be SamplingParams")
        ids, params = self.encode(prompt), params or SamplingParams()
        if params.n != 1:
            raise ParameterError(f"n={params.n}: a stream has one answer; call generate, or stream once a seed")
        yield from self._engine([ids], [params], method, trace).submit(ids, params)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string, chat messages, or ids. Raises ParameterError for anything else."""
        if isinstance(prompt, str):
            try:
                return self.tokenizer(prompt)["input_ids"]
            except TypeError as error:  # half of a surrogate pair, say
                raise ParameterError(f"prompt={prompt!a:.60}: the tokenizer can't read this text ({error})") from error
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise ParameterError(
                f"prompt={reprlib.repr(prompt)}: must be a string, messages or a list of plain ints; give an array's "
                "or a tensor's .tolist()"
            )
        items = list(prompt)
        if items and isinstance(items[0], dict):
            if not getattr(self.tokenizer, "chat_template", None):
                raise ParameterError("chat messages need a chat template and this target has none: give text instead")
            try:
                encoded = self.tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=True)
            except Exception as error:  # templates are programs: theirs may be any
                raise ParameterError(
                    f"messages={reprlib.repr(items)}: the chat template can't render these ({error}); each needs a "
                    "role and a content, both strings"
                ) from error
            return encoded["input_ids"]
        return items  # type: ignore[return-value]

    def asked(self, messages: Sequence[dict[str, str]]) -> Prompt:
        """A conversation as this target is asked: as it stands where there is a chat template, else its bare text."""
        chat = getattr(self.tokenizer, "chat_template", None)
        return messages if chat else "\n\n".join(message["content"] for message in messages)

    def check_method(self, method: str) -> None:
        """Raise ParameterError for an unknown method, DrafterError for one that needs a drafter where there is none."""
        if method not in METHODS:
            raise ParameterError(f"method={method!r}: must be one of {', '.join(METHODS)}")
        if method != "plain" and self.drafter is None:
            raise DrafterError(
                f"method={method!r} needs a drafter and this target has none: pass drafter= or method='plain'"
            )

    def _engine(self, prompts: list[list[int]], params: list[SamplingParams], method: Method, trace: bool) -> Engine:
        longest = max((len(ids) + p.max_tokens for ids, p in zip(prompts, params, strict=True)), default=2)
        return Engine(self, method, min(sum(p.n for p in params), self.max_rows) or 1, max(2, longest), trace=trace)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | dict):
        raise ParameterError(f"prompts={reprlib.repr(prompts)}: must be text, messages or token ids, or a list of such")
    items = list(prompts)
    return [items] if items and isinstance(items[0], int | dict) else items


def _is_one(params: Any) -> TypeGuard[SamplingParams | None]:
    return params is None or isinstance(params, SamplingParams)


def _checked_params(params: Any) -> list[SamplingParams]:
    """A list of SamplingParams; ParameterError for anything else."""
    each = list(params) if isinstance(params, Sequence) else [params]
    if odd := [one for one in each if not isinstance(one, SamplingParams)]:
        raise ParameterError(f"params: {reprlib.repr(odd[0])} instead of SamplingParams; give one, or one a prompt")
    return each


def _eos_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return [index for index in {*ids, getattr(tokenizer, "eos_token_id", None)} if index is not None]
