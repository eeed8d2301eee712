"""`DCOCODecoder`: a target, its drafter and corrector, and the round that they decode in.

    decoder = DCOCODecoder.from_pretrained("smollm2_135m")
    output = decoder.generate("Why is the sky blue?", SamplingParams(max_tokens=64))[0]

Shapes: R rows, n drafted slots, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dcoco.corrector import Corrector, Scores, load_corrector
from dcoco.engine import Batch, Engine
from dcoco.errors import DrafterError, ParameterError
from dcoco.output import Chunk, RequestOutput
from dcoco.targets import drafter_folder, load_target, resolve_drafter
from dcoco.walk import walk
from drafters.base import Draft, Drafter
from drafters.registry import load_drafter
from verifier.rejection import Verdict, verify_match, verify_one_hot, verify_sampled
from verifier.sampling import SamplingParams, draw, probabilities
from verifier.target import Target

Method = Literal["dcoco", "top1", "plain"]
Rule = Literal["match", "one_hot", "sampled"]
METHODS = ("dcoco", "top1", "plain")
RULES = ("match", "one_hot", "sampled")
NO_DRAFTER = "none"
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


class DCOCODecoder:
    """Decodes prompts several times faster than the target alone, with the target's own distribution.

    Args:
        target, tokenizer: the model whose output is preserved.
        drafter: proposes blocks; None allows `method="plain"` only.
        corrector: picks a coherent path through the drafter's candidates; None makes "dcoco" the same as "top1".
        eos_ids: tokens that end an answer.
        rule: how drafts are verified above temperature 0; all three keep the distribution exactly, and `match` also
            keeps the very text that plain sampling gives with the same seed.
        max_rows: prompts decoded at once; further ones wait.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafter: Drafter | None = None,
        corrector: Corrector | None = None,
        eos_ids: Sequence[int] = (),
        rule: Rule = "match",
        max_rows: int = 32,
    ):
        if rule not in RULES:
            raise ParameterError(f"rule={rule!r}: must be one of {', '.join(RULES)}")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.corrector = corrector
        with torch.inference_mode():
            embedding = target.embedding_weight()
            self.token_table = None if corrector is None else corrector.token_table(embedding)  # [V, D]
        self.eos_ids = frozenset(eos_ids)
        self.rule = rule
        self.max_rows = max_rows

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        rule: Rule = "match",
        max_rows: int = 32,
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
        return cls(wrapped, tokenizer, loaded, corrector, _eos_ids(model, tokenizer), rule, max_rows)

    # ------------------------------------------------------------------------------------------------ the round

    @torch.inference_mode()
    def round(self, batch: Batch, lengths: list[int]) -> Verdict:
        """Draft, correct, verify: one target pass that commits between 1 and n + 1 tokens a row.

        `lengths[r]` tokens of row r's draft are submitted; with all of them 0 this is plain decoding.
        """
        slots = max(lengths)
        positions = batch.positions(slots + 1)  # [R, n + 1]: where the drafted tokens and the bonus token will stand
        with batch.clock("draft"):
            lattice = self._propose(batch, slots)
        with batch.clock("correct"):
            draft = self._choose(batch, lattice, positions[:, :slots])
        with batch.clock("verify"):
            ids = torch.cat([batch.anchors[:, None], draft.tokens], dim=1)
            taps = self.drafter.taps if self.drafter and batch.method != "plain" else ()
            result = self.target.forward(ids, batch.cache, taps)
            verdict = self._verify(batch, self.target.logits(result.hidden), draft, lengths, positions)
            if batch.draft_state is not None and self.drafter is not None:
                self.drafter.observe(batch.draft_state, 0, result.taps, verdict.accepted + 1)
        return verdict

    def _propose(self, batch: Batch, slots: int) -> Any:
        if slots == 0 or self.drafter is None or batch.draft_state is None:
            return Draft(batch.anchors.new_empty(len(batch.anchors), 0))
        return self.drafter.draft(batch.draft_state, batch.anchors, batch.cache, slots)

    def _choose(self, batch: Batch, lattice: Any, positions: Tensor) -> Draft:
        if isinstance(lattice, Draft):
            return lattice
        batch.lattice_ids = lattice.ids
        if batch.method == "dcoco" and self.corrector is not None and self.token_table is not None:
            scores = self.corrector(lattice, self.token_table)
        else:
            scores = Scores.unary(lattice)
        return walk(lattice, scores, batch.sampling, positions, sampled=self.rule == "sampled")

    def _verify(self, batch: Batch, logits: Tensor, draft: Draft, lengths: list[int], positions: Tensor) -> Verdict:
        drafted = torch.tensor(lengths, device=logits.device)
        if batch.sampling.all_greedy:
            return verify_match(logits.float().argmax(-1), draft.tokens, drafted)
        p = probabilities(logits, batch.sampling)
        if self.rule == "match":
            return verify_match(draw(p, batch.sampling, positions), draft.tokens, drafted)
        if self.rule == "sampled" and draft.candidates is not None and draft.q is not None:
            return verify_sampled(p, draft.tokens, drafted, draft.candidates, draft.q, batch.sampling, positions)
        return verify_one_hot(p, draft.tokens, drafted, batch.sampling, positions)

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
            method: "dcoco", "top1" (the drafter's own best candidates) or "plain" (no drafting).
            trace: keep each round's candidates in `RequestOutput.trace`.
            progress: show a progress bar.

        Raises:
            ParameterError: an empty or too long prompt, ids outside the vocabulary, a wrong argument.
        """
        prompt_ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompt_ids)
        else:
            each = list(params)
        if len(each) != len(prompt_ids):
            raise ParameterError(f"params: {len(each)} given for {len(prompt_ids)} prompts; give one, or one a prompt")
        engine = self._engine(prompt_ids, each, method, trace)
        requests = [engine.submit(ids, one) for ids, one in zip(prompt_ids, each, strict=True)]
        with tqdm(total=len(requests), disable=not progress, unit="prompt") as bar:
            while engine.busy:
                bar.update(len({id(request) for request in engine.step() if request.output is not None}))
        return [request.result() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, method: Method = "dcoco", trace: bool = False
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece: a chunk a round, whole characters only; the last one holds the output."""
        ids, params = self.encode(prompt), params or SamplingParams()
        engine = self._engine([ids], [params], method, trace)
        request = engine.submit(ids, params)
        while engine.busy:
            engine.step()
            text, token_ids = request.take()
            if text or token_ids or request.output is not None:
                yield Chunk(text, token_ids, request.output)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string, chat messages, or ids."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        items = list(prompt)
        if items and isinstance(items[0], dict):
            if not getattr(self.tokenizer, "chat_template", None):
                raise ParameterError("chat messages need a chat template and this target has none: give text instead")
            encoded = self.tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=True)
            return encoded["input_ids"]
        return items  # type: ignore[return-value]

    def asked(self, messages: Sequence[dict[str, str]]) -> Prompt:
        """A conversation as this target is asked: as it stands where there is a chat template, else its bare text."""
        chat = getattr(self.tokenizer, "chat_template", None)
        return messages if chat else "\n\n".join(message["content"] for message in messages)

    def _engine(self, prompts: list[list[int]], params: list[SamplingParams], method: Method, trace: bool) -> Engine:
        if method not in METHODS:
            raise ParameterError(f"method={method!r}: must be one of {', '.join(METHODS)}")
        if method != "plain" and self.drafter is None:
            raise DrafterError(
                f"method={method!r} needs a drafter and this target has none: pass drafter= or method='plain'"
            )
        longest = max((len(ids) + p.max_tokens for ids, p in zip(prompts, params, strict=True)), default=1)
        return Engine(self, method, min(len(prompts), self.max_rows) or 1, longest, trace)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int | dict) else items


def _eos_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return [index for index in {*ids, getattr(tokenizer, "eos_token_id", None)} if index is not None]
