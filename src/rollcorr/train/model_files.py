"""Locate model files: a directory, a model of the demos, or a model of the hub, downloaded once."""

from __future__ import annotations

import os
import re
from pathlib import Path

# `owner/name`, or `owner/name@revision` with a branch, a tag or a commit.
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

# File patterns of a model and its tokenizer. Other formats of the same weights are not downloaded.
NEEDED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def model_directory(path: str | os.PathLike[str]) -> Path:
    """Return the directory that contains a model.

    An existing directory is returned unchanged. A hub id is resolved in the hub's cache; missing files are downloaded
    with a progress bar. The hub's own variables apply (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`).

    Raises:
        FileNotFoundError: the directory does not exist and the text is no hub id, or the download failed.
    """
    path = os.fspath(path)
    directory = Path(path)
    if directory.is_dir():
        return directory
    if not HUB_ID.fullmatch(path) or path.startswith("."):
        raise FileNotFoundError(f"model.path {path!r} does not exist")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = str(path).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(NEEDED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"model.path {str(path)!r} is no directory here, and the hub did not give a model of that name ({reason}); "
            "give a directory written by `save_pretrained`, or load the model where there is a network"
        ) from error


def demo_model_directory(name: str) -> Path:
    """Return the directory of a small model of the demos: `"demo"` or `"shapes"`.

    A separate distribution contains the models, because they are larger than this package. A clone contains them too.

    Raises:
        FileNotFoundError: the distribution is not installed.
    """
    try:
        import rollcorr_demo_models
    except ImportError as error:
        raise FileNotFoundError(
            f"model.path {name!r} is a small model of the demos, and these are not installed: "
            "pip install rollcorr-demo-models, or give a directory with a model"
        ) from error
    return rollcorr_demo_models.FOLDER / name
