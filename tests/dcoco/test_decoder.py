"""The output is the target's: identity with plain decoding, endings, limits, streams, statistics."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from dcoco import SamplingParams
from dcoco.engine import Batch, Engine
from dcoco.errors import DrafterError, ParameterError, TargetError
from drafters.dflash import DFlashConfig, DFlashDrafter
from tests.models import EOS, FAMILIES, SHAPE, VOCABULARY, explicit_mask, prompts, tiny_decoder
from verifier.cache import RaggedCache
from verifier.target import Target


def reference(decoder, prompt, tokens):
    """Plain greedy decoding by the bare transformers model, without any cache."""
    ids = list(prompt)
    for _ in range(tokens):
        query = torch.tensor([ids])
        mask = explicit_mask(decoder.target, len(ids))
        with torch.no_grad():
            logits = decoder.target.model(input_ids=query, attention_mask=mask, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_bare_model(family):
    decoder = tiny_decoder(family)
    given = [*prompts(4), [5], [5]]
    params = SamplingParams(max_tokens=24)
    for method in ("dcoco", "walk", "top1", "plain"):
        outputs = decoder.generate(given, params, method)
        for prompt, output in zip(given, outputs, strict=True):
            assert output.token_ids == reference(decoder, prompt, 24), (family, method)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01}]
)
def test_sampled_text_is_plain_samplings_alone_and_in_any_batch(family, params):
    decoder = tiny_decoder(family)
    given = prompts(6, seed=1)
    each = [SamplingParams(max_tokens=20, seed=seed, **params) for seed in range(6)]
    plain = decoder.generate(given, each, "plain")
    batched = decoder.generate(given, each, "dcoco")
    backwards = decoder.generate(given[::-1], each[::-1], "top1")[::-1]
    alone = [decoder.generate([prompt], one)[0] for prompt, one in zip(given, each, strict=True)]
    for outputs in (batched, backwards, alone):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.accepted_tokens for output in batched) > 0


def test_rows_come_and_go():
    """More prompts than rows, of different lengths and limits, greedy and sampled side by side."""
    decoder = tiny_decoder(max_rows=3)
    given = prompts(9, seed=2)
    each = [SamplingParams(max_tokens=3 + 4 * i, temperature=0.7 * (i % 2), seed=i) for i in range(9)]
    outputs = decoder.generate(given, each)
    alone = [decoder.generate([prompt], one, "plain")[0] for prompt, one in zip(given, each, strict=True)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def test_a_drafter_that_knows_the_answer_is_accepted_whole():
    """Negative control of the identity tests: drafts are really used. Feeding the truth gives B + 1 tokens a round."""
    decoder = tiny_decoder(eos_ids=[])
    prompt = prompts(1)[0]
    truth = decoder.generate([prompt], SamplingParams(max_tokens=31), "plain")[0].token_ids
    draft = decoder.drafter.draft

    def oracle(state, anchors, cache, slots, context):
        lattice = draft(state, anchors, cache, slots)
        start = cache.lengths[0] - len(prompt) + 1
        lattice.ids[0, :, 0] = torch.tensor((truth + [0] * slots)[start : start + slots])
        return lattice

    decoder.drafter.draft = oracle
    output = decoder.generate([prompt], SamplingParams(max_tokens=31), "top1")[0]
    assert output.token_ids == truth
    assert output.stats.rounds == 6
    assert output.stats.mean_acceptance_length == 5.0
    assert output.stats.acceptance_per_position == [1.0] * 4


@pytest.mark.parametrize("rule", ["match", "one_hot", "sampled"])
def test_all_rules_are_greedy_at_temperature_0(rule):
    decoder = tiny_decoder(rule=rule)
    given = prompts(5, seed=3)
    each = [SamplingParams(max_tokens=16, temperature=0.9 * (i % 2), seed=i) for i in range(5)]
    outputs = decoder.generate(given, each)
    plain = decoder.generate(given, each, "plain")
    for index in (0, 2, 4):
        assert outputs[index].token_ids == plain[index].token_ids


def test_an_untrained_corrector_is_the_plain_drafter():
    decoder = tiny_decoder(trained=False, eos_ids=[])
    params = SamplingParams(max_tokens=30)
    for prompt in prompts(4, seed=4):
        corrected, top1 = (decoder.generate([prompt], params, method)[0].stats for method in ("walk", "top1"))
        assert (corrected.rounds, corrected.accepted_at) == (top1.rounds, top1.accepted_at)


def test_statistics_agree_with_the_output():
    decoder = tiny_decoder()
    for output in decoder.generate(
        prompts(8, seed=5), SamplingParams(max_tokens=30, temperature=0.5, seed=1), trace=True
    ):
        stats = output.stats
        assert stats.committed_tokens == len(output.token_ids) - 1
        assert stats.accepted_tokens == sum(stats.accepted_at) <= stats.draft_tokens
        assert stats.acceptance_per_position == sorted(stats.acceptance_per_position, reverse=True)
        assert len(output.trace) == stats.rounds
        assert [trace.start for trace in output.trace] == [
            1 + sum(trace.committed for trace in output.trace[:index]) for index in range(stats.rounds)
        ]


def test_a_row_is_taken_over_by_the_next_request():
    """The published architecture keeps keys and values of its own, which must start afresh too."""
    decoder = tiny_decoder("qwen3", max_rows=2)
    torch.manual_seed(1)
    drafter = DFlashDrafter(decoder.target, DFlashConfig.for_target(decoder.target, 2, (0, 3), 4))
    drafter.initialise()
    decoder.drafter, decoder.corrector = drafter.prepare(), None
    given = prompts(7, seed=9)
    outputs = decoder.generate(given, SamplingParams(max_tokens=12))
    plain = decoder.generate(given, SamplingParams(max_tokens=12), "plain")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_long_prompts_are_run_in_chunks(monkeypatch):
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 5)
    for family in ("llama", "gemma3"):
        decoder = tiny_decoder(family)
        given = prompts(6, longest=30, seed=10)
        outputs = decoder.generate(given, SamplingParams(max_tokens=10))
        for prompt, output in zip(given, outputs, strict=True):
            assert output.token_ids == reference(decoder, prompt, 10)


def test_what_cannot_be_decoded_exactly_is_refused():
    with pytest.raises(TargetError, match="softcap"):
        shape = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
        Target(Gemma2ForCausalLM(Gemma2Config(**shape, num_key_value_heads=2, head_dim=16)))
    with pytest.raises(TargetError, match="recurrent"):
        Target(MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)))
    with pytest.raises(TargetError, match="belongs to a target already"):
        Target(Target(FAMILIES["llama"]()).model)
    for change, said in (
        ({"layer_types": ["chunked_attention"] * 4}, "layers of type chunked_attention"),
        ({"num_hidden_layers": 5}, "no list of its 5 decoder layers"),
    ):
        model = FAMILIES["llama"]()
        vars(model.config).update(change)
        with pytest.raises(TargetError, match=said):
            Target(model)


def test_a_head_that_does_more_than_is_known_is_refused(monkeypatch):
    """Its own logits are then not the head's output, and plain decoding would already be another model's."""
    forward = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = 1.5 * out.logits
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(TargetError, match="differ from its own"):
        Target(FAMILIES["llama"]())


def test_a_cache_says_when_it_is_full():
    with pytest.raises(ParameterError, match="rows >= 1"):
        RaggedCache(0, 8)
    cache = RaggedCache(2, 8)
    cache.lengths[1] = 6
    cache.begin(0, 2, 2)
    with pytest.raises(ParameterError, match="8 positions a row; 6 are taken and 9 would be"):
        cache.begin(0, 2, 3)


def test_no_activations_are_kept_between_rounds():
    decoder = tiny_decoder()
    decoder.generate(prompts(2), SamplingParams(max_tokens=4))
    assert decoder.target.tapped == {}


def test_wrong_arguments_are_named():
    decoder = tiny_decoder()
    with pytest.raises(ParameterError, match="method='fast'"):
        decoder.generate([[5]], method="fast")
    with pytest.raises(ParameterError, match="no tokens"):
        decoder.generate([[]])
    with pytest.raises(ParameterError, match=str(VOCABULARY)):
        decoder.generate([[VOCABULARY]])
    with pytest.raises(ParameterError, match="2 given for 1"):
        decoder.generate([[5]], [SamplingParams()] * 2)
    with pytest.raises(ParameterError, match="stop_token_ids names token 64; the vocabulary ends at 63"):
        decoder.generate([[5]], SamplingParams(stop_token_ids=[3, 64]))
    for name, value in {"tree_size": 0, "worth": 1.0, "rule": "best"}.items():
        with pytest.raises(ParameterError, match=f"{name}={value!r}: must be"):
            tiny_decoder(**{name: value})
    with pytest.raises(ParameterError, match="chat template"):
        decoder.generate([[{"role": "user", "content": "hi"}]])
    for wrong in (None, 5, 1.5, b"abc", {"role": "user", "content": "hi"}):
        with pytest.raises(ParameterError, match="prompts="):
            decoder.generate(wrong)
    for wrong in (5, "x", {"max_tokens": 2}, [5], [None]):
        with pytest.raises(ParameterError, match="params: "):
            decoder.generate([[5]], wrong)
    with pytest.raises(ParameterError, match="params=5"):
        next(decoder.stream([5], 5))
    for name, value in {"tree_size": 2.5, "max_rows": 0, "worth": "x"}.items():
        with pytest.raises(ParameterError, match=f"{name}={value!r}: must be"):
            tiny_decoder(**{name: value})
    with pytest.raises(ParameterError, match="submit_all"):
        Engine(decoder).submit([5], SamplingParams(n=2))
    decoder.drafter = None
    with pytest.raises(DrafterError, match="drafter"):
        decoder.generate([[5]])
    assert decoder.generate([[5]], SamplingParams(max_tokens=2), "plain")


def test_rows_of_all_lengths_change_places_and_keep_their_text(monkeypatch):
    """Long and short prompts in turn: rows are sorted by length again and again, in cycles of moves."""
    arranged, arrange = [], Batch.arrange

    def watch(batch):
        before = [id(request) for request in batch.requests]
        arrange(batch)
        arranged.append(before != [id(request) for request in batch.requests])

    monkeypatch.setattr(Batch, "arrange", watch)
    monkeypatch.setattr("dcoco.engine.DISORDER", 1.05)
    monkeypatch.setattr("verifier.packing.SEGMENT", 24)
    decoder = tiny_decoder("gemma3", max_rows=6, eos_ids=[])
    given = [[*prompt, 5, 6][-6:] * (9 if index % 2 else 1) for index, prompt in enumerate(prompts(14, seed=11))]
    each = [
        SamplingParams(max_tokens=4 + 3 * (seed % 5), temperature=0.9, seed=seed, frequency_penalty=0.3)
        for seed in range(14)
    ]
    outputs = decoder.generate(given, each)
    assert sum(arranged) > 3
    monkeypatch.setattr(Batch, "arrange", lambda batch: None)
    alone = [decoder.generate([prompt], one, "plain")[0] for prompt, one in zip(given, each, strict=True)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def test_the_end_of_a_long_prompt_runs_beside_a_longer_chunk(monkeypatch):
    """The rows of a chunk are padded to the longest, beyond the end of a row that is nearly full."""
    monkeypatch.setattr("dcoco.engine.PREFILL_CHUNK", 64)
    decoder = tiny_decoder(eos_ids=[])
    given = [[5 + index % 7 for index in range(length)] for length in (68, 58, 60)]
    outputs = decoder.generate(given, SamplingParams(max_tokens=2))
    for prompt, output in zip(given, outputs, strict=True):
        assert output.token_ids == reference(decoder, prompt, 2)
