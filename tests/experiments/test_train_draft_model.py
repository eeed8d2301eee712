"""Training a draft model: it learns the answers, a resumed run is the unbroken one, the checkpoint drafts."""

import json
import math

import pytest
import torch
from omegaconf import OmegaConf

from dcoco import DCOCODecoder, SamplingParams
from drafters.checkpoint import target_identity
from drafters.registry import load_drafter
from experiments.train_draft_model import Trainer, projected_embeddings
from tests.models import VOCABULARY, LetterTokenizer, llama, prompts
from verifier.errors import ConfigError
from verifier.target import Target

FIXED = {"steps": 60, "held_out": 8, "sequences_per_step": 8, "lr": 1e-2, "warmup": 2, "decay": 0.4, "seed": 0}
SHAPE = {"hidden_size": 24, "layers": 1, "intermediate_size": 32, "heads": 2, "kv_heads": 1, "block_size": 3}
CONFIG = OmegaConf.create({**FIXED, **SHAPE, "weight_decay": 0.01, "draft_vocab_size": 30})


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return Target(llama(), pack=False)


@pytest.fixture(scope="module")
def answers():
    """Each token is followed by the third behind it; of the tokens only multiples of 3 occur."""
    found = [[token // 3 * 3 for token in prompt] for prompt in prompts(60, longest=12)]
    return [
        {"prompt_ids": prompt, "response_ids": [(prompt[-1] + 3 * step) % 63 for step in range(1, 5 + index % 30)]}
        for index, prompt in enumerate(found)
    ]


def test_it_learns_and_its_checkpoint_drafts(target, answers, tmp_path):
    trainer = Trainer(target, answers, CONFIG)
    before = trainer.evaluate()
    losses = [trainer.train_step() for _ in range(60)]
    after = trainer.evaluate()
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    assert 1.0 <= before["length"] < after["length"] <= 4.0 and after["accuracy"] > 0.8
    assert len(trainer.occurring) == 22 and trainer.tokens > 0

    trainer.save_checkpoint(tmp_path, target_identity(target, LetterTokenizer()), {"figures": after})
    drafter = load_drafter(tmp_path, target, LetterTokenizer())
    table = drafter.model.embedding_weight()
    others = [token for token in range(VOCABULARY) if token not in trainer.occurring]
    start = projected_embeddings(target, 24)
    torch.testing.assert_close(table[others], start[others].bfloat16().float())
    assert (table[trainer.occurring] - start[trainer.occurring]).abs().max() > 0.01
    assert json.loads((tmp_path / "config.json").read_text())["training"]["figures"] == after
    decoder = DCOCODecoder(target, LetterTokenizer(), drafter)
    params = SamplingParams(max_tokens=9)
    drafted, plain = (decoder.generate(prompts(3), params, method) for method in ("dcoco", "plain"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_a_resumed_run_is_the_unbroken_run(target, answers, tmp_path):
    unbroken, broken, resumed = (Trainer(target, answers, CONFIG) for _ in range(3))
    losses = [unbroken.train_step() for _ in range(12)]
    again = [broken.train_step() for _ in range(5)]
    broken.save(tmp_path / "state.pt")
    resumed.restore(tmp_path / "state.pt")
    again += [resumed.train_step() for _ in range(7)]
    assert again == losses and resumed.step == 12 and resumed.tokens == unbroken.tokens
    for mine, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_held_out_loss_is_of_the_tokens_that_can_be_drafted(target, answers):
    few = Trainer(target, answers, OmegaConf.merge(CONFIG, {"draft_vocab_size": 6}))
    assert few.evaluate()["loss"] == pytest.approx(math.log(6), abs=0.2)  # it has learnt nothing yet


def test_predictions_are_those_of_each_sequence_alone(target, answers):
    trainer = Trainer(target, answers, CONFIG)
    with torch.no_grad():
        together, labels = trainer.hidden([3, 29, 8])
        alone = [trainer.hidden([index])[0] for index in (3, 29, 8)]
    torch.testing.assert_close(together, torch.cat(alone), atol=0.02, rtol=0.02)
    expected = [token for index in (3, 29, 8) for token in answers[index]["response_ids"]]
    assert trainer.occurring[labels].tolist() == expected


def test_wrong_settings_are_named(target, answers):
    with pytest.raises(ConfigError, match="held_out=60 of 60 answers"):
        Trainer(target, answers, OmegaConf.merge(CONFIG, {"held_out": 60}))
    with pytest.raises(ConfigError, match="hidden_size=64: must be at most the target's 32"):
        Trainer(target, answers, OmegaConf.merge(CONFIG, {"hidden_size": 64}))
