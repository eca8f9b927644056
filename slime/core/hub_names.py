"""Names on the Hugging Face hub where a path is meant: nothing is downloaded, but the command is named."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".zst", ".parquet", ".json", ".csv", ".txt", ".yaml", ".py")


def download_hint(name: str, *, dataset: bool = False) -> str:
    """What to do about a path that does not exist, if it may be a name on the hub (`Qwen/Qwen3-0.6B`); else empty.

    A path below a folder that exists is none, nor is one that ends like a file.
    """
    if not _NAME.fullmatch(name) or name.endswith(_FILES) or Path(name).parent.exists():
        return ""
    what, folder = f"{name} --repo-type dataset" if dataset else name, name.partition("/")[2]
    return f"a name on the hub is downloaded first: hf download {what} --local-dir {folder}, then give {folder}"
