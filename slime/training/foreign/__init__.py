"""Reads and writes `torch_dist` folders of Megatron-core, and reads pickled rollouts of the public slime.

A pickle is read as data and never runs (`inert`). slime runs only its own code, no matter what the file contains, so
reading needs no sandbox. Memory is limited while a file is read.

1. `slime convert` opens such files only with `--trust-pickle`. Nothing else in slime reads pickles.
2. A pickle can name only a few harmless functions and types. Its classes become records. Any other name raises an error
   that shows the name.
3. Only weights are read: optimizer, generators, scheduler and the arguments of the run (`common.pt`) are not opened.
   The error for a missing, unknown or misshapen weight names the weight, and is raised before a tensor is read.
4. `torch_dist` finds a parameter under the names that Megatron-core uses: layers and experts separate or stacked, norms
   separate or fused, gate and up of an MLP in one tensor or two. The family's weight table then converts parameters to
   Hugging Face tensors, one at a time.
5. `write_torch_dist` writes such a folder with Megatron-core's `dist_checkpointing`, on one rank, with the names of
   Transformer Engine layers, without building a model.
"""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError


def require_trust(path: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` unless the user trusts `path`. Reads nothing."""
    if not trusted:
        raise ConfigError(
            f"{path} contains pickles, which can run code; pass --trust-pickle if you trust the source of the file. "
            "slime then reads the pickles as data and runs none of their code"
        )
