"""Settings: numbers that make no sense are named, and a run goes on with its own settings only."""

import pytest
from omegaconf import OmegaConf

from dcoco.errors import ConfigError
from experiments.environment import CONF
from experiments.settings import check_numbers, check_same_run, shaping

TRAINERS = ("train_drafter", "train_corrector", "train_eagle", "train_draft_model", "ablate")


def settings(name, **changes):
    config = OmegaConf.load(f"{CONF}/{name}.yaml")
    config.pop("hydra", None)
    return OmegaConf.merge(config, {"target": "tiny", "answers": "answers.jsonl"}, changes)


@pytest.mark.parametrize("name", [*TRAINERS, "compare", "theory"])
def test_the_shipped_settings_make_sense(name):
    check_numbers(settings(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 0}, "gamma=0: must be a number above 0"),
        ({"lr": -1e-3}, "lr=-0.001: must be a number above 0"),
        ({"steps": 0}, "steps=0: must be an integer, at least 1"),
        ({"limit": 0}, "limit=0: must be an integer, at least 1"),
        ({"steps": 1.5}, "steps=1.5: must be an integer"),
        ({"block_lengths": [2, 0]}, "must be an integer, at least 1"),
        ({"drafter_rate": -1}, "drafter_rate=-1: must be a number, at least 0"),
        ({"gamma": True}, "gamma=True"),
    ],
)
def test_senseless_numbers_are_named(changes, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        check_numbers(settings("train_corrector", **changes))


def test_a_run_may_go_on_further_and_elsewhere_but_not_otherwise():
    config = settings("train_corrector")
    state = {"settings": shaping(config)}
    check_same_run(state, settings("train_corrector", steps=900, run="elsewhere", answers="moved.jsonl"), "state.pt")
    with pytest.raises(ConfigError, match="other gamma, seed: name another run"):
        check_same_run(state, settings("train_corrector", gamma=2.0, seed=1), "state.pt")
    with pytest.raises(ConfigError, match="name another run"):
        check_same_run({}, config, "state.pt")  # states of before say nothing
