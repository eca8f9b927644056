"""Reads and writes Megatron-core `torch_dist` folders, and reads pickled rollouts of the public slime.

Pickles are parsed as data and never executed (`inert`). Whatever a file contains, only slime's own code runs, so no
sandbox is needed. Memory is limited while a file is read.

1. `slime convert` opens such files only with `--trust-pickle`. Nothing else in slime reads pickles.
2. A pickle may reference only a few harmless functions and types, and its classes become records. Any other reference
   raises an error that shows the name.
3. Only weights are read. Optimizer, RNG and scheduler states and the run's arguments (`common.pt`) are not opened. A
   weight that is missing, unknown or of the wrong shape raises an error with its name before any tensor is read.
4. `torch_dist` handles all names that Megatron-core uses: layers and experts can be separate or stacked, norms separate
   or fused, and the gate and up projections in one tensor or two. The family's weight table then converts parameters to
   Hugging Face tensors, one at a time.
5. `write_torch_dist` writes such a folder with Megatron-core's `dist_checkpointing` on one rank, using the names of
   Transformer Engine layers. It does not build a model.
"""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError


def require_trust(path: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` unless the user trusts `path`. Reads nothing."""
    if not trusted:
        raise ConfigError(
            f"{path} contains pickles, which can execute code; pass --trust-pickle if you trust the source of the file "
            "(slime parses pickles as data and executes none of their code)"
        )
