"""Where the files of a model are: a directory, a model of the demos, or a model of the hub that is downloaded once."""

from __future__ import annotations

import os
import re
from pathlib import Path

# `owner/name`, or `owner/name@revision` with a branch, a tag or a commit.
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

# What a model and its tokenizer are made of. Other formats of the same weights are left where they are.
NEEDED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def model_directory(path: str | os.PathLike[str]) -> Path:
    """The directory that holds a model.

    A directory is taken as it is. Else a hub id names one: what the hub's cache lacks is downloaded, with a progress
    bar. The hub's own variables apply (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`).

    Raises:
        FileNotFoundError: there is no such directory, and the text is no hub id, or the hub did not give the model.
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
    """The directory of a small model of the demos: `"demo"` or `"shapes"`.

    They are a distribution of their own, because they are larger than this package. A clone has them beside it.

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
