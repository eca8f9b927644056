"""Writes a checkpoint in a released shape with random weights and a copied tokenizer, to measure without a download.

python -m benchmarks.random_checkpoint --shape 30b-a3b-6l --out /tmp/moe --tokenizer assets/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.training.shapes import SHAPES


def tensors_of(config: dict[str, Any], *, seed: int) -> Iterator[tuple[str, Any]]:
    """Yields (HF name, bfloat16 tensor) of every parameter, drawn on any GPU: norms 1, others N(0, 0.02)."""
    import torch

    from slime.models import table_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    table = table_for(config)
    for name in table.hf_names:
        shape = table.shape_of(name)
        if len(shape) == 1:
            yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16)
        else:
            yield name, torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)


def write(out: Path, shape: str, tokenizer: Path | None, *, seed: int = 0) -> None:
    """Writes a folder in Hugging Face format, replacing an earlier one of its own. Raises `CheckpointError` for other
    existing folders.
    """
    from slime.training.state.hf_files import begin_export, commit_export, copy_assets, write_hf

    with tempfile.TemporaryDirectory() as temporary:
        assets = Path(temporary)
        if tokenizer is not None:
            copy_assets(tokenizer, assets)
        (assets / "config.json").write_text(json.dumps(SHAPES[shape]))
        (assets / "generation_config.json").unlink(missing_ok=True)  # of a different model
        partial = begin_export(out)
        write_hf(partial, tensors_of(SHAPES[shape], seed=seed), assets_from=assets)
        commit_export(partial, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is copied")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.out, options.shape, options.tokenizer, seed=options.seed)
