"""Names to weights: what `target=` and `drafter=` accept, and how a target is loaded.

A target is one YAML file in `conf/target`, a local folder, a GGUF file, or a hub id:

    model, tokenizer, source = load_target("smollm2_135m")          # conf/target/smollm2_135m.yaml
    model, tokenizer, source = load_target("Qwen/Qwen3-8B")         # a hub id
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dcoco.errors import ConfigError, TargetError
from dcoco.fetch import fetch, fetch_hub

# In a wheel conf/ travels inside the package; in a clone it lies beside it.
_PACKAGE = Path(__file__).resolve().parent
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
DRAFTERS = _PACKAGE.parent / "drafters"


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the Python index and the file inside its wheel that holds (a part of) the weights."""

    name: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class TargetSource:
    """Where a target comes from: exactly one of `packages`, `hub` and `path` is set.

    `sha256` and `bytes` describe the GGUF that the packages' members give when joined. `chat` is False for a model
    that only completes text, None where the tokenizer decides. `drafter` is the default drafter's name, if any.
    """

    name: str
    description: str = ""
    license: str = ""
    packages: tuple[Package, ...] = ()
    sha256: str | None = None
    bytes: int | None = None
    hub: str | None = None
    path: Path | None = None
    chat: bool | None = None
    drafter: str | None = None


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """Where a drafter comes from: a local folder (`path`) or a hub id; `target` is the conf name it was trained for."""

    name: str
    description: str = ""
    license: str = ""
    target: str | None = None
    hub: str | None = None
    path: Path | None = None


def list_names(group: str) -> list[str]:
    """The names in conf/<group> ("target" or "drafter"), sorted."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def resolve_target(name: str) -> TargetSource:
    """The source that `name` stands for: a name in conf/target, a folder, a GGUF file, or a hub id, in this order.

    Nothing is downloaded. Raises ConfigError for a name that is none of these.
    """
    if name in list_names("target"):
        return _read_target(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"target folder {name!r} has no config.json; expected a transformers model folder")
        return TargetSource(name=path.resolve().name, path=path.resolve())
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise TargetError(f"target file {name!r} is not a GGUF file; expected a model folder or a .gguf file")
        return TargetSource(name=path.stem, path=path.resolve())
    if _is_hub_id(name):
        # A hub model that conf/target knows brings its default drafter along.
        known = (_read_target(other) for other in list_names("target"))
        return next((source for source in known if source.hub == name), TargetSource(name=name, hub=name))
    raise _unknown("target", name, "a folder, a GGUF file or a hub id (owner/name)")


def resolve_drafter(name: str) -> DrafterSource:
    """The drafter that `name` stands for: a name in conf/drafter, a folder, or a hub id, in this order.

    Nothing is downloaded; see `drafter_folder`. Raises ConfigError for a name that is none of these.
    """
    if name in list_names("drafter"):
        return _read_drafter(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return DrafterSource(name=path.resolve().name, path=path.resolve())
    if _is_hub_id(name):
        return DrafterSource(name=name, hub=name)
    raise _unknown("drafter", name, "a folder or a hub id (owner/name)")


def drafter_folder(source: DrafterSource) -> Path:
    """The local folder of a drafter's checkpoint, fetched from the hub where need be (FetchError where it can't be)."""
    if source.hub is not None:
        return fetch_hub(source.hub)
    assert source.path is not None
    return source.path


def pick_device(device: Any = None) -> Any:
    """The torch.device asked for; by default CUDA where there is one, else the CPU."""
    import torch

    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(dtype: Any, device: Any) -> Any:
    """The torch.dtype for the weights: the one asked for ("float32", "bf16", torch.bfloat16 ...).

    None and "auto" mean bfloat16 where the device multiplies it natively, else float32: a CPU without such
    instructions emulates bfloat16, which is slower than float32. Raises ConfigError for an unknown name.
    """
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        elif device.type == "cpu":
            found = torch.cpu.get_capabilities()  # "bf16" is ARM's name
            native = any(found.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
        else:
            native = False
        return torch.bfloat16 if native else torch.float32
    names = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    names |= {"float16": torch.float16, "fp16": torch.float16, "float64": torch.float64}
    if dtype not in names:
        raise ConfigError(f"dtype is {dtype!r}; expected auto or one of {', '.join(names)}")
    return names[dtype]


def load_target(
    name: str | TargetSource, dtype: Any = None, device: Any = None, trust_remote_code: bool = False
) -> tuple[Any, Any, TargetSource]:
    """Load a target: (model, tokenizer, source), the model in eval mode, without gradients, on `device`.

    `name` is anything that `resolve_target` takes, or its result; `dtype` and `device` as in `pick_dtype` and
    `pick_device`. Weights not yet here are fetched (FetchError); a folder that transformers can't load, or whose
    weights are incomplete, is a TargetError.
    """
    from transformers import AutoTokenizer

    from verifier.loading import load_whole, quiet_transformers

    source = resolve_target(name) if isinstance(name, str) else name
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    folder = fetch(source)
    model = load_whole(folder, f"target {source.name!r}", TargetError, dtype, trust_remote_code)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # anything from OSError to RuntimeError for a bad folder
        raise TargetError(
            f"the tokenizer of target {source.name!r} can't be loaded from {folder}: {error}. Get its files again"
        ) from error
    if source.chat is False:
        tokenizer.chat_template = None  # a base model: some carry a template that they were never trained on
    return model.to(device).eval().requires_grad_(False), tokenizer, source


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    looks_local = name.startswith((".", "~")) or name.endswith(".gguf")
    return bool(owner and slash and model) and "/" not in model and "\\" not in name and not looks_local


def _unknown(group: str, name: str, others: str) -> ConfigError:
    names = list_names(group)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return ConfigError(f"unknown {group} {name!r}{hint} Known are {', '.join(names)}; or name {others}")


def _read_target(name: str) -> TargetSource:
    file = CONF / "target" / f"{name}.yaml"
    entry = _read(file, {"description", "license", "source", "chat", "drafter"})
    place = _checked(entry["source"], {"packages", "sha256", "bytes", "hub"}, f"{file}: source", required=set())
    if ("hub" in place) == ("packages" in place):
        raise ConfigError(f"{file}: source needs either hub or packages")
    if "packages" in place:
        _checked(place, {"packages", "sha256", "bytes"}, f"{file}: source")
    packages = tuple(
        Package(**_checked(package, {"name", "version", "member"}, f"{file}: package"))
        for package in place.pop("packages", ())
    )
    return TargetSource(name=name, packages=packages, **place, **{key: entry[key] for key in entry if key != "source"})


def _read_drafter(name: str) -> DrafterSource:
    file = CONF / "drafter" / f"{name}.yaml"
    entry = _read(file, {"description", "license", "source", "target"})
    place = _checked(entry.pop("source"), {"hub", "path"}, f"{file}: source", required=set())
    if len(place) != 1:
        raise ConfigError(f"{file}: source needs either hub or path")
    if "path" in place:
        place["path"] = DRAFTERS / place["path"]
    return DrafterSource(name=name, **place, **entry)


def _read(file: Path, keys: set[str]) -> dict[str, Any]:
    try:
        entry = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    return _checked(entry, keys, str(file))


def _checked(entry: Any, keys: set[str], where: str, required: set[str] | None = None) -> dict[str, Any]:
    """A copy of `entry`, which must be a mapping with all `required` keys (default: all `keys`) and no others."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}; expected a mapping with {', '.join(sorted(keys))}")
    unknown = set(entry) - keys
    missing = (keys if required is None else required) - set(entry)
    if unknown or missing:
        faults = [f"unknown key {key!r}" for key in sorted(unknown)] + [f"no key {key!r}" for key in sorted(missing)]
        raise ConfigError(f"{where}: {', '.join(faults)}; expected {', '.join(sorted(keys))}")
    return dict(entry)
