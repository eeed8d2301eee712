"""Training EAGLE: a resumed run is the unbroken one, the loss falls, the checkpoint drafts."""

import pytest
import torch
from omegaconf import OmegaConf

from drafters.checkpoint import target_identity
from drafters.eagle import EagleConfig, EagleDrafter
from drafters.registry import load_drafter
from experiments.features import FeatureStore, build
from experiments.train_drafter import draft_vocabulary
from experiments.train_eagle import EagleTrainer
from tests.models import LetterTokenizer, llama, prompts
from verifier.target import Target

TAPS = (0, 2, 3)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def world(request, tmp_path_factory):
    """A tiny target, answers to learn from, and their features."""
    torch.manual_seed(0)
    target = Target(llama().to(request.param), pack=False)
    folder = tmp_path_factory.mktemp("features")
    answers = [
        {"prompt_ids": prompt, "response_ids": [3 + (prompt[0] + step) % 8 for step in range(4 + index % 30)]}
        for index, prompt in enumerate(prompts(40, longest=12))
    ]
    build(folder, target, answers, TAPS, ())
    return target, folder, answers


def trainer(world, steps=8):
    target, folder, answers = world
    config = OmegaConf.create(
        {
            "held_out": 8, "steps": steps, "sequences_per_step": 4, "unrolled": 3, "gamma": 4.5, "lr": 1e-2,
            "warmup": 2, "decay": 0.5, "weight_decay": 0.01, "seed": 0, "ema": None,
        }
    )  # fmt: skip
    drafter = EagleDrafter(target, EagleConfig(TAPS, 4), draft_vocabulary(answers, 50))
    drafter.initialise(scale=1.0)
    return EagleTrainer(drafter.prepare_training(), FeatureStore(folder, TAPS, ()), config)


def test_examples_are_the_tokens_behind_every_token_of_the_answers(world):
    _, _, answers = world
    run = trainer(world)
    batch, labels_RAn = run.examples(torch.Generator())
    for row, index in enumerate(run._sequences_of_step()):
        prompt, response = answers[index]["prompt_ids"], answers[index]["response_ids"]
        assert batch.anchors[row, : len(response)].tolist() == list(range(len(prompt), len(prompt) + len(response)))
        for place, found in enumerate(labels_RAn[row].tolist()):
            assert found == (response[place + 1 : place + 4] + [-1] * 3)[:3]


def test_a_resumed_run_is_the_unbroken_run(world, tmp_path):
    unbroken = trainer(world)
    losses = [unbroken.train_step() for _ in range(8)]
    broken = trainer(world)
    again = [broken.train_step() for _ in range(3)]
    broken.save(tmp_path / "state.pt")
    resumed = trainer(world)
    resumed.restore(tmp_path / "state.pt")
    again += [resumed.train_step() for _ in range(5)]
    assert again == losses
    for mine, theirs in zip(resumed.drafter.parameters(), unbroken.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_loss_falls_and_the_checkpoint_drafts(world, tmp_path):
    target, _, _ = world
    run = trainer(world, steps=60)
    losses = [run.train_step() for _ in range(60)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    figures = run.evaluate()
    assert 2 < figures["top1_length"] <= 5
    assert len(figures["top1_accuracy"]) == 4
    run.drafter.save(tmp_path, target_identity(target, LetterTokenizer()), {"steps": 60})
    again = load_drafter(tmp_path, target, LetterTokenizer())
    assert again.config == run.drafter.config
    assert again.taps == (-1, *TAPS)
