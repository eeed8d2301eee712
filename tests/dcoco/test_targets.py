"""Names of targets and drafters, the checks on conf/, and loading a local folder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dcoco import targets
from dcoco.errors import ConfigError, FetchError, TargetError
from dcoco.targets import (
    drafter_folder,
    list_names,
    load_target,
    pick_device,
    pick_dtype,
    resolve_drafter,
    resolve_target,
)

CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved two-layer llama with a tokenizer of eight words."""
    path = tmp_path / "tiny"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty conf/ to write faulty entries into."""
    for group in ("target", "drafter"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    monkeypatch.setattr(targets, "CONF", tmp_path / "conf")
    return tmp_path / "conf"


def test_every_shipped_entry_is_valid() -> None:
    assert {"smollm2_135m", "gemma3_270m", "qwen25_coder_05b", "qwen25_coder_15b"} <= set(list_names("target"))
    for name in list_names("target"):
        source = resolve_target(name)
        assert source.description and source.license and (source.drafter is None or resolve_drafter(source.drafter))
        if source.packages:
            assert source.sha256 and len(source.sha256) == 64 and source.bytes
    for name in list_names("drafter"):
        drafter = resolve_drafter(name)
        assert drafter.target is None or resolve_target(drafter.target)


def test_packages_are_read_in_order() -> None:
    source = resolve_target("qwen25_coder_15b")
    assert [package.member[-10:] for package in source.packages] == [f"part{i:02d}.bin" for i in range(1, 23)]
    assert (source.hub, source.path, source.chat, source.drafter) == (None, None, True, None)


def test_hub_id_and_a_known_one_brings_its_drafter() -> None:
    source = resolve_target("owner/model")
    assert (source.name, source.hub, source.drafter) == ("owner/model", "owner/model", None)
    assert resolve_target("Qwen/Qwen3-8B") == resolve_target("qwen3_8b")
    assert resolve_drafter("owner/drafter").hub == "owner/drafter"


def test_folder_and_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_target(str(folder)).path == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_target("tiny").path == folder  # relative, without a slash
    (tmp_path / "model.gguf").write_bytes(b"GGUF....")
    source = resolve_target("model.gguf")
    assert (source.name, source.path) == ("model", tmp_path / "model.gguf")
    assert drafter_folder(resolve_drafter("tiny")) == folder


def test_what_is_none_of_these_is_a_config_error_with_a_hint(tmp_path: Path) -> None:
    close = r"unknown target 'smolm2_135m'; did you mean 'smollm2_135m'\? Known are gemma3_270m, .*; or name a folder"
    with pytest.raises(ConfigError, match=close):
        resolve_target("smolm2_135m")
    with pytest.raises(ConfigError, match=r"unknown target 'nothing'\. Known are gemma3_270m, .*; or name a folder"):
        resolve_target("nothing")
    for name in ("./no/such/folder", "a/b/c", "/no-such-root", "~/none", "folder/none.gguf", "owner/"):
        with pytest.raises(ConfigError, match="unknown target"):
            resolve_target(name)
    with pytest.raises(ConfigError, match="unknown drafter 'x'"):
        resolve_drafter("x")


def test_folder_or_file_of_another_kind_is_a_target_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config\.json"):
        resolve_target(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(TargetError, match="not a GGUF file"):
        resolve_target(str(tmp_path / "notes.txt"))


GOOD = "description: d\nlicense: l\nsource: {hub: a/b}\nchat: true\ndrafter: null\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "colour: red\n", "unknown key 'colour'"),
        (GOOD.replace("chat: true\n", ""), "no key 'chat'"),
        (GOOD.replace("{hub: a/b}", "{hub: a/b, sha: x}"), "unknown key 'sha'"),
        (GOOD.replace("{hub: a/b}", "{}"), "either hub or packages"),
        (GOOD.replace("{hub: a/b}", "{hub: a/b, packages: []}"), "either hub or packages"),
        (GOOD.replace("{hub: a/b}", "{packages: []}"), "no key 'bytes', no key 'sha256'"),
        (GOOD.replace("{hub: a/b}", "{packages: [{name: x}], sha256: a, bytes: 1}"), "no key 'member'"),
        (GOOD.replace("{hub: a/b}", "a/b"), "expected a mapping"),
        ("- a\n", "expected a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_faulty_target_entry(conf: Path, text: str, said: str) -> None:
    (conf / "target" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        resolve_target("mine")
    assert "mine.yaml" in str(error.value)


def test_faulty_drafter_entry(conf: Path) -> None:
    file = conf / "drafter" / "mine.yaml"
    file.write_text("description: d\nlicense: l\ntarget: t\nsource: {hub: a/b, path: c}\n")
    with pytest.raises(ConfigError, match="either hub or path"):
        resolve_drafter("mine")
    file.write_text("description: d\nlicense: l\ntarget: t\nsource: {path: checkpoints/c}\n")
    assert resolve_drafter("mine").path == targets.DRAFTERS / "checkpoints/c"


def test_load_local_folder(folder: Path) -> None:
    model, tokenizer, source = load_target(str(folder), dtype=torch.float32)
    assert model.dtype == torch.float32 and not model.training and model.device == pick_device()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer("w3").input_ids == [3] and source.path == folder


def test_incomplete_or_unreadable_weights_are_target_errors(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    lost = "model.layers.0.mlp.up_proj.weight"
    save_file({name: weight for name, weight in weights.items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=f"1 missing weights: {lost}"):
        load_target(str(folder))
    save_file({**weights, lost: torch.zeros(3, 3)}, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=lost):
        load_target(str(folder))
    save_file({**weights, lost: weights[lost].to(torch.int8)}, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=f"1 integer weights: {lost}"):
        load_target(str(folder))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(TargetError, match="can't be loaded"):
        load_target(str(folder))


def shards(folder: Path) -> list[Path]:
    """The folder's weights, written anew in several files."""
    torch.manual_seed(0)
    (folder / "model.safetensors").unlink()
    LlamaForCausalLM(CONFIG).save_pretrained(folder, max_shard_size="2KB")
    return sorted(folder.glob("model-*.safetensors"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BROKEN = {
    "no shard": (lambda folder: shards(folder)[1].unlink(), "model-00002"),
    "a truncated shard": (lambda folder: cut(shards(folder)[1]), "incomplete metadata"),
    "another shard's copy": (lambda folder: shutil.copy(*shards(folder)[:2]), "missing weights"),
    "no index": (lambda folder: shards(folder) and (folder / "model.safetensors.index.json").unlink(), "no file named"),
    "a broken index": (lambda folder: shards(folder) and cut(folder / "model.safetensors.index.json"), "loaded from"),
    "fewer layers than weights": (lambda folder: change_config(folder, num_hidden_layers=1), "9 unexpected weights"),
    "more layers than weights": (lambda folder: change_config(folder, num_hidden_layers=3), "9 missing weights"),
    "another vocabulary": (lambda folder: change_config(folder, vocab_size=9), "2 mismatched weights"),
    "a size that is no number": (lambda folder: change_config(folder, hidden_size="wide"), "expected int, got str"),
    "an unknown architecture": (lambda folder: change_config(folder, model_type="none"), "does not recognize"),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("token*")], "tokenizer"),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize(("spoil", "said"), BROKEN.values(), ids=BROKEN)
def test_a_folder_that_is_not_whole_is_a_target_error(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(TargetError, match=said) as error:
        load_target(str(folder))
    assert re.search("[Gg]et .* (again|from the same place)", str(error.value))


def test_shards_make_a_target(folder: Path) -> None:
    assert len(shards(folder)) > 2
    whole, _, _ = load_target(str(folder), dtype=torch.float32)
    torch.manual_seed(0)
    for mine, theirs in zip(whole.parameters(), LlamaForCausalLM(CONFIG).parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_hub_without_network_is_a_fetch_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="owner/model"):
        load_target("owner/model")


def test_dtype_names_and_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert pick_dtype("bf16", cpu) is pick_dtype("bfloat16", cpu) is torch.bfloat16
    assert pick_dtype(torch.float64, cpu) is torch.float64
    for flags, expected in (({"avx512_bf16": True}, torch.bfloat16), ({"avx512_f": True}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags)
        assert pick_dtype("auto", cpu) is pick_dtype(None, cpu) is expected
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        pick_dtype("int8", cpu)
