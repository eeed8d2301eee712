"""Training: features are the target's own, a resumed run is the unbroken one, the loss falls."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from dcoco.registry import load_corrector
from drafters.block_diffusion import BlockDiffusionConfig, BlockDiffusionDrafter
from drafters.checkpoint import target_identity
from drafters.registry import load_drafter
from experiments import train_corrector
from experiments.cotraining import CoTrainer
from experiments.features import FeatureStore, build, read_answers
from experiments.heads import KINDS, new_head, teacher_forced_loss
from experiments.lattices import collect
from experiments.train_drafter import Trainer, blocks, draft_vocabulary, new_drafter, walk_rounds
from tests.models import VOCABULARY, LetterTokenizer, llama, prompts
from verifier.cache import RaggedCache
from verifier.errors import ConfigError
from verifier.target import Target

SHAPE = BlockDiffusionConfig((1, 3), (0, 3), block_size=4, candidates=40)
TAPS, LAYERS = (0, 3), (1, 3)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def world(request, tmp_path_factory):
    """A tiny target, answers to learn from, and their features."""
    torch.manual_seed(0)
    target = Target(llama().to(request.param), pack=False)
    folder = tmp_path_factory.mktemp("features")
    answers = [
        {"prompt_ids": prompt, "response_ids": [(prompt[0] + 3 * step) % VOCABULARY for step in range(4 + index % 30)]}
        for index, prompt in enumerate(prompts(40, longest=12))
    ]
    build(folder, target, answers, TAPS, LAYERS)
    return target, folder, answers


def trainer(world, steps=8):
    target, folder, answers = world
    config = OmegaConf.create(
        {
            "held_out": 8, "steps": steps, "sequences_per_step": 4, "slots_per_step": 64, "block_lengths": [2, 4],
            "gamma": 4.0, "lr": 1e-2, "warmup": 2, "decay": 0.5, "weight_decay": 0.01, "seed": 0, "ema": 0.9,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = BlockDiffusionDrafter(target, SHAPE, draft_vocabulary(answers, 50))
    drafter.initialise(scale=1.0)
    return Trainer(drafter.prepare_training(), FeatureStore(folder, TAPS, LAYERS), config)


def test_features_are_what_the_target_computes(world):
    target, folder, answers = world
    store = FeatureStore(folder, TAPS, LAYERS)
    batch = store.batch([5, 9], torch.tensor([[3], [3]]))
    for row, index in enumerate((5, 9)):
        ids = torch.tensor([answers[index]["prompt_ids"] + answers[index]["response_ids"]])
        cache = RaggedCache(1, ids.shape[1])
        result = target.forward(ids, cache, TAPS)
        length = ids.shape[1]
        assert torch.equal(batch.ids[row, :length], ids[0])
        for mine, theirs in zip(batch.taps, result.taps, strict=True):
            torch.testing.assert_close(mine[row, :length], theirs[0].bfloat16(), atol=0.05, rtol=0.05)
        for layer in LAYERS:
            keys = cache.layer(layer)[0][0].bfloat16()
            torch.testing.assert_close(batch.keys[layer][row, :, :length], keys, atol=0.05, rtol=0.05)


def test_building_goes_on_where_it_stopped_and_refuses_other_answers(world, tmp_path):
    target, folder, answers = world
    build(tmp_path, target, answers, TAPS, LAYERS)
    (tmp_path / "done").write_text("0")
    build(tmp_path, target, answers, TAPS, LAYERS)
    first, second = FeatureStore(folder, TAPS, LAYERS), FeatureStore(tmp_path, TAPS, LAYERS)
    assert torch.equal(first.taps[1], second.taps[1])
    with pytest.raises(ConfigError, match="other answers"):
        build(tmp_path, target, answers[:5], TAPS, LAYERS)
    with pytest.raises(ConfigError, match="tap 2, layer 0"):
        FeatureStore(folder, (2,), (0,))
    with pytest.raises(ConfigError, match="no answers"):
        build(tmp_path / "none", target, [], TAPS, LAYERS)
    assert not (tmp_path / "none").exists()


def test_labels_are_the_tokens_behind_the_anchor(world):
    _, folder, answers = world
    store = FeatureStore(folder, TAPS, LAYERS)
    batch, labels = blocks(store, [0, 30], 16, 4, torch.Generator().manual_seed(0))
    for row, index in enumerate((0, 30)):
        ids = answers[index]["prompt_ids"] + answers[index]["response_ids"]
        for anchor, found in zip(batch.anchors[row].tolist(), labels[row].tolist(), strict=True):
            assert anchor >= len(answers[index]["prompt_ids"])
            assert found == (ids[anchor + 1 : anchor + 5] + [-1] * 4)[:4]


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


def test_the_loss_falls_and_untrained_columns_never_win(world):
    run = trainer(world, steps=60)
    losses = [run.train_step() for _ in range(60)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    figures = run.evaluate()
    assert 1 <= figures["top1_length"] <= figures["oracle_length"] <= 5
    assert run.drafter.head.weight.shape[0] == len(run.drafter.draft_ids) <= 50


def test_the_published_architecture_trains_too(world, tmp_path):
    target, folder, answers = world
    config = trainer(world, steps=40).config
    config.update({"backbone": "dflash", "target_layers": [1, 3], "taps": [0, 3], "block_size": 4, "draft_ids": None})
    store = FeatureStore(folder, TAPS, ())
    torch.manual_seed(0)
    drafter = new_drafter(config, target, store, draft_vocabulary(answers, 50))
    run = Trainer(drafter.prepare_training(), store, config)
    losses = [run.train_step() for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    drafter.save(tmp_path, target_identity(target, LetterTokenizer()), {})
    assert type(load_drafter(tmp_path, target, LetterTokenizer())) is type(drafter)


def test_rounds_are_walked_as_decoding_walks_them():
    assert walk_rounds([0, 0, 0]) == 3
    assert walk_rounds([2, 0, 0, 1, 0]) == 2
    assert walk_rounds([8] * 20) == 3
    assert walk_rounds([]) == 0


def test_the_learning_rate_warms_up_stays_and_falls(world):
    run = trainer(world, steps=20)
    rates = []
    for run.step in range(20):
        rates.append(run.learning_rate())
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1:11] == pytest.approx([1e-2] * 10)
    assert rates[15] == pytest.approx(5e-3)


@pytest.fixture(scope="module")
def drafted(world, tmp_path_factory):
    """A trained drafter's checkpoint, the drafter, and its lattices of training and held-out answers."""
    target, folder, _ = world
    run, checkpoint = trainer(world, steps=30), tmp_path_factory.mktemp("drafter")
    for _ in range(30):
        run.train_step()
    run.drafter.save(checkpoint, target_identity(target, LetterTokenizer()), {"steps": 30})
    drafter = load_drafter(checkpoint, target, LetterTokenizer())
    config = OmegaConf.create({"held_out": 8, "seed": 0, "blocks": 200, "passes": 4})
    return checkpoint, drafter, *collect(drafter, FeatureStore(folder, TAPS, LAYERS), config)


def corrector_trainer(world, drafted, kind, steps=60):
    blocks, rate = (
        (16, 1e-2) if kind == "lilicorr" else (64, 3e-2)
    )  # a transformer is slow, and wants to be taught slowly
    config = OmegaConf.create(
        {
            "kind": kind, "width": 16, "pair_width": 32, "rank": 16, "gated": kind == "markov", "steps": steps,
            "blocks_per_step": blocks, "gamma": 4.0, "lr": rate, "weight_decay": 0.01, "seed": 0,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    head = new_head(config, world[0], drafted[1])
    return train_corrector.Trainer(head, drafted[2], world[0].embedding_weight(), config, "digest")


@pytest.mark.parametrize("kind", KINDS)
def test_correctors_of_all_kinds_train_are_saved_and_draft(world, drafted, tmp_path, kind):
    checkpoint, drafter, training, held_out = drafted
    assert len(training) >= 200
    steps = 30 if kind == "lilicorr" else 80  # so few teach a transformer little
    run = corrector_trainer(world, drafted, kind, steps)
    before = run.lengths(held_out)
    assert before["selected"] == before["top1"] <= before["oracle"]
    losses = [run.train_step() for _ in range(steps)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    after = run.lengths(held_out)
    assert after["selected"] > before["top1"] or kind == "lilicorr"
    assert ("tree" in after) == (kind != "markov")

    saved, identity = tmp_path / "head", target_identity(world[0], LetterTokenizer())
    train_corrector.save(run.head, saved, checkpoint, identity, {"figures": after})
    loaded = load_drafter(saved, world[0], LetterTokenizer())
    if kind == "markov":
        assert loaded.base.config == drafter.config
    else:
        assert loaded.config == drafter.config
        assert type(load_corrector(saved, world[0])) is type(run.head)
    assert (saved / "model.safetensors").exists() == (kind in ("contextual", "markov"))


def test_a_drafter_and_its_corrector_learn_together(world, drafted):
    config = corrector_trainer(world, drafted, "contextual").config
    config.update({"held_out": 8, "blocks_per_step": 32, "drafter_rate": 0.3})
    store = FeatureStore(world[1], TAPS, LAYERS)
    run = CoTrainer(world[0], drafted[0], store, config)
    start = {name: weight.clone() for name, weight in run.head.state_dict().items()}
    before = run.lengths(drafted[3])
    assert before["selected"] == before["top1"]  # an untrained corrector changes nothing
    if world[0].dtype == torch.float32:  # elsewhere frozen drafters are rounded
        alone = corrector_trainer(world, drafted, "contextual")
        alone.head.recalls = False  # as the co-trained one
        assert before == alone.lengths(drafted[3])
    losses = [run.train_step() for _ in range(config.steps)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    moved = {name for name, weight in run.head.state_dict().items() if not torch.equal(weight, start[name])}
    assert {"drafter.slots", "corrector.slot.weight"} <= moved
    assert {"drafter.head.weight", "drafter.draft_ids"}.isdisjoint(moved)
    after = run.lengths(drafted[3])
    assert after["selected"] > before["selected"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_correctors_run_is_the_unbroken_run(world, drafted, tmp_path, kind):
    unbroken = corrector_trainer(world, drafted, kind, steps=8)
    losses = [unbroken.train_step() for _ in range(8)]
    broken = corrector_trainer(world, drafted, kind, steps=8)
    again = [broken.train_step() for _ in range(3)]
    broken.save(tmp_path / "state.pt")
    resumed = corrector_trainer(world, drafted, kind, steps=8)
    resumed.restore(tmp_path / "state.pt")
    again += [resumed.train_step() for _ in range(5)]
    assert again == losses
    for mine, theirs in zip(resumed.head.parameters(), unbroken.head.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = corrector_trainer(world, drafted, "selector" if kind != "selector" else "lilicorr")
    with pytest.raises(ConfigError, match="name another run"):
        other.restore(tmp_path / "state.pt")
    slower = corrector_trainer(world, drafted, kind, steps=8)
    slower.config.lr /= 2
    with pytest.raises(ConfigError, match="other lr"):
        slower.restore(tmp_path / "state.pt")


def test_the_checkpoint_is_that_of_the_best_evaluation(world, drafted, tmp_path, monkeypatch):
    run = corrector_trainer(world, drafted, "contextual", steps=5)
    run.config.save_every = 1
    lengths = iter([2.0, 3.0, 2.5, 2.9, 3.1])
    monkeypatch.setattr(run, "lengths", lambda held_out: {"selected": next(lengths)})
    kept = []
    train_corrector.train(run, drafted[3], tmp_path, lambda figures: kept.append(figures["step"]))
    assert kept == [1, 2, 5]
    resumed = corrector_trainer(world, drafted, "contextual", steps=6)
    resumed.config.save_every = 1
    resumed.restore(tmp_path / "state.pt")
    monkeypatch.setattr(resumed, "lengths", lambda held_out: {"selected": 3.0})
    train_corrector.train(resumed, drafted[3], tmp_path, lambda figures: kept.append(figures["step"]))
    assert kept == [1, 2, 5] and resumed.step == 6


def test_the_true_predecessors_scores_are_those_of_all_pairs(world, drafted):
    """The contextual corrector's loss leaves out the pairs that don't count; so it is as if all had been scored."""
    run = corrector_trainer(world, drafted, "contextual")
    for _ in range(5):
        run.train_step()
    corrector, embedding = run.head, run.embedding
    for recalls in (True, False):
        examples = drafted[2].select(slice(0, 50), recalls)
        loss = teacher_forced_loss(corrector, examples, embedding, 4.0)
        scores = corrector(examples.lattice, corrector.token_table(embedding.float()), examples.recalled)
        total = weight = 0.0
        for row, labels in enumerate(examples.labels.tolist()):
            before = None
            for slot, label in enumerate(labels):
                ids = examples.lattice.ids[row, slot].tolist()
                if label not in ids:
                    break
                row_of_scores = scores.first[row] if before is None else scores.rest[row, slot - 1, before]
                before = ids.index(label)
                fading = 2.718281828 ** (-slot / 4.0)
                total, weight = total - fading * row_of_scores.log_softmax(0)[before].item(), weight + fading
        assert abs(loss.item() - total / weight) < 1e-4


def test_fewer_candidates_recall_at_their_own_last_place(drafted):
    few, many = (drafted[2].select(slice(0, 50), candidates=count) for count in (3, None))
    assert few.lattice.ids.shape[-1] == 3
    assert torch.equal(few.lattice.ids[..., :2], many.lattice.ids[..., :2]) or few.recalled.column.min() < 2
    assert torch.equal(few.recalled.matched, many.recalled.matched)
    found = few.lattice.ids.gather(2, few.recalled.column[..., None])[..., 0]
    there = few.recalled.matched > 0
    assert there.any()
    assert torch.equal(found[there], drafted[2].ahead[:50][there])


def test_answers_too_short_for_a_block_are_skipped(tmp_path):
    file = tmp_path / "answers.jsonl"
    lines = [{"prompt_ids": [5], "response_ids": [3] * length} for length in (1, 3, 4, 9)]
    lines.append({"prompt_ids": [], "response_ids": []})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sorted(len(answer["response_ids"]) for answer in read_answers(file)) == [4, 9]
