"""What a run left behind, without what differs between equal runs; and the files of it that are not whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def outcome(run: Path) -> Iterator[tuple[str, str]]:
    """Everything under a run directory, by name: digests of tensors, rows and bytes, without times."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir():
            yield f"{name}/", ""
        elif name.startswith("tensorboard/") or path.name in ("manifest.json", "run.lock"):
            continue  # events have times; the identity of a run is drawn
        else:
            try:
                yield from _content(name, path)
            except Exception as error:
                yield name, f"cannot be read: {error}"


def torn_files(run: Path) -> list[str]:
    """Files under their final names that are not whole; hidden ones, events and a last line of metrics may be cut."""
    torn = []
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir() or "/." in f"/{name}" or name.startswith("tensorboard/") or name == "run.lock":
            continue
        lines = path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = lines[: lines.rfind(b"\n") + 1]
        elif not lines:
            torn.append(f"{name} is empty")
        try:
            for line in lines.splitlines() if path.name == "metrics.jsonl" else ():
                json.loads(line)
            if path.suffix == ".json":
                json.loads(lines)
            elif path.suffix in (".parquet", ".safetensors", ".pt"):
                dict(_content(name, path))
        except Exception as error:
            torn.append(f"{name} is torn: {error}")
    return torn


def _content(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """The content of one file, by name."""
    if path.name == "history.json":
        history = json.loads(path.read_text(encoding="utf-8"))
        yield name, json.dumps({key: value for key, value in history.items() if key != "run"})
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield from _tensors(name, load_file(path))
    elif path.suffix == ".pt":
        import torch

        yield from _tensors(name, torch.load(path, weights_only=True))
    elif path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield name, _digest(repr(pq.read_table(path).to_pylist()).encode())
    elif path.name == "metrics.jsonl":
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row = json.loads(line)
            kept = {key: value for key, value in row.items() if not key.startswith("perf/")}
            yield f"{name} line {number}", json.dumps(kept)
    else:
        yield name, _digest(path.read_bytes())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 (a nested state)
    import torch

    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(f"{name}:{key}", part)
    elif torch.is_tensor(value):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, f"{value.dtype} {tuple(value.shape)} {_digest(content)}"
    else:
        yield name, repr(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
