"""Files of other programs: Megatron-core's `torch_dist` folders, both ways, and pickled rollouts of the public slime.

The law: a pickle is read as data and never runs (`inert`). This holds on every kernel and needs no confined process:
whatever the file says, slime calls only its own code, so there is nothing to confine but memory, which is limited while
a file is read.

1. `slime convert` opens such files only with `--trust-pickle`. Nothing else in slime reads pickles.
2. A pickle may name a short list of harmless things; its classes become records, and any other name is refused by name.
3. Weights only: optimizer, generators, scheduler and the arguments of the run (`common.pt`) are not opened. A missing,
   unknown or misshapen weight is refused by name, before a tensor is read.
4. `torch_dist` finds a parameter under the names that Megatron-core gives it: layers and experts separate or stacked,
   norms separate or fused, gate and up of an MLP in one tensor or two. The family's own weight table then makes Hugging
   Face tensors of it, one at a time.
5. `write_torch_dist` writes such a folder with Megatron-core's own `dist_checkpointing`, on one rank, under the names
   of its Transformer Engine layers, without building a model.
"""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError


def require_trust(path: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` unless the user trusts `path`. Reads nothing."""
    if not trusted:
        raise ConfigError(
            f"{path} is made of pickles, and a pickle is a program; give --trust-pickle if you know where it comes "
            "from: it is then read as data, and nothing in it runs"
        )
