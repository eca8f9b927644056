"""Files of other programs: Megatron-core's `torch_dist` folders, both ways, and pickled rollouts of the public slime.

The plan
1. A pickle is a program, and both kinds of file are made of pickles. `slime convert` reads them only with
   `--trust-pickle`, and nothing else in slime reads them at all.
2. They are opened in a process of their own (`reader`): no network, no file but what was named and libraries, none
   written, memory bounded. What the kernel does not give of it is logged.
3. There, too, a pickle runs nothing: it may name a short list of harmless things (`inert`); a class is replaced by a
   record of what it was given, and any other name is refused by name. Tensors are read with `weights_only`.
4. Out of that process come JSON and plain bytes (`confined`): numbers, names, shapes, the content of one tensor.
5. Weights only: optimizer, generators, scheduler and the arguments of the run that wrote a folder (`common.pt`) are not
   opened. A weight that the model lacks, or that it has too much, is refused by name.
6. `names` says where Megatron-core keeps a parameter: layers and experts by themselves or stacked, norms by themselves
   or fused, halves of a gated MLP apart. What it stores is what one tensor-parallel rank would hold, so that the
   family's own weight table makes the Hugging Face tensors of it (`torch_dist`), one at a time.
7. `write_torch_dist` goes the other way through Megatron-core's own `dist_checkpointing`, on one rank, in the names of
   its Transformer Engine layers, without building a model.
"""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError

# Whether a file of pickles may be opened at all: somebody has to say so. Imports nothing heavy.


def require_trust(path: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` unless the user trusts `path`; nothing of it has been read then."""
    if not trusted:
        raise ConfigError(
            f"got {path}, which is made of pickles, and a pickle is a program; give --trust-pickle if you know where "
            "it comes from: it is then read as data alone, in a process without network and without other files"
        )
