"""Memory and time of loading a Hugging Face checkpoint into the parameters of one rank.

python -m benchmarks.loading            writes 1.2 GB of random weights to a temporary folder; 1 minute on two cores

The checkpoint has the shape of Qwen3-0.6B (bfloat16, tied embedding) in files of at most 300 MB. Each row is a child
process with the parameters of one rank and `hf_weights.fill`, as in the trainer. Memory is the increase from before the
parameters exist to the peak while they are filled, divided by the size of the parameters (included):
  anonymous   the process's own memory (RssAnon, read every millisecond)
  file        pages of mapped files in the process, which the kernel can reclaim at any time (RssFile, the same)
  resident    both at their common peak, as the kernel counts it (VmHWM); its limit is 1.3
For comparison, the row "whole tensors" reads each whole tensor through `safetensors.safe_open`, slices and copies it.
Times are with a warm page cache. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 1.3
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
RANKS = {
    "TP 1": {"tp_rank": 0, "tp_size": 1},
    "TP 2, rank 0": {"tp_rank": 0, "tp_size": 2},
    "TP 2, rank 1": {"tp_rank": 1, "tp_size": 2},
    "PP 2, stage 0": {"tp_rank": 0, "tp_size": 1, "layers": 14},
    "TP 1, float32": {"tp_rank": 0, "tp_size": 1, "dtype": "float32"},
    "TP 1, from FP8": {"tp_rank": 0, "tp_size": 1, "fp8": True},
    "TP 2, rank 0, whole tensors": {"tp_rank": 0, "tp_size": 2, "whole": True},
}


def write(folder: Path) -> None:
    """Writes the checkpoint and an FP8 version of it."""
    import torch

    from slime.cli.checkpoint_conversion import convert
    from slime.models import table_for
    from slime.training.state import hf_files

    hf_files.MAX_SHARD_BYTES = 300 * 1000**2
    (folder / "assets").mkdir()
    (folder / "assets" / "config.json").write_text(json.dumps(CONFIG))
    table, generator = table_for(CONFIG), torch.Generator().manual_seed(0)
    tensors = (
        (name, (torch.randn(table.shape_of(name), generator=generator) * 0.02).bfloat16()) for name in table.hf_names
    )
    hf_files.write_hf(folder / "bf16", tensors, assets_from=folder / "assets")
    convert(folder / "bf16", folder / "fp8", "fp8")


def memory() -> dict[str, int]:
    """Returns the resident bytes of this process by kind."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {key.rstrip(":"): int(rest[0]) * 1024 for key, *rest in lines if key in ("RssAnon:", "RssFile:", "VmHWM:")}


class Peak(threading.Thread):
    """A thread that reads the sizes every millisecond until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = memory()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.001):
            self.highest = {key: max(self.highest[key], value) for key, value in memory().items()}

    def stop(self) -> dict[str, int]:
        self._stopped.set()
        self.join()
        return {key: max(self.highest[key], value) for key, value in memory().items()}


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Loads one rank in this process."""
    import torch

    from slime.models import table_for
    from slime.training.state.hf_files import HfReader
    from slime.training.state.hf_weights import fill
    from slime.training.state.sharded_model import ShardedModel, ShardedTensor
    from slime.weights.hf_shards import load_shard

    rank = RANKS[name]
    cut = {"tp_rank": rank["tp_rank"], "tp_size": rank["tp_size"]}
    table = table_for(CONFIG)
    layers = range(rank.get("layers", CONFIG["num_hidden_layers"]))
    held = [e for e in table.entries if _is_held(e.megatron, layers)]
    shapes = {}
    for e in held:
        whole = {n: torch.empty(table.shape_of(n), device="meta") for n in e.hf}
        shapes[e.megatron] = load_shard(table, e.megatron, whole.__getitem__, **cut).shape
    source = folder / ("fp8" if "fp8" in rank else "bf16")
    torch.zeros(1).to(torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory()
    dtype = getattr(torch, rank.get("dtype", "bfloat16"))
    parameters = {n: torch.empty(shape, dtype=dtype) for n, shape in shapes.items()}
    peak = Peak()
    peak.start()
    start_s = time.perf_counter()
    if "whole" in rank:
        _fill_whole(parameters, table, source, cut)
    else:
        whole = {"tp_rank": 0, "tp_size": 1}
        tensors = {
            e.megatron: ShardedTensor(
                e, tuple(shapes[e.megatron]), dtype, **(whole if e.expert is not None or e.row.dim is None else cut)
            )
            for e in held
        }
        with HfReader(source) as read:
            fill(ShardedModel(table, tensors, torch.device("cpu")).at(parameters), read)
    time_s = time.perf_counter() - start_s
    after = peak.stop()
    own_bytes = sum(p.nbytes for p in parameters.values())
    return {
        "rank": name,
        "shard_gb": own_bytes / 1e9,
        "anonymous": (after["RssAnon"] - before["RssAnon"]) / own_bytes,
        "file": (after["RssFile"] - before["RssFile"]) / own_bytes,
        "resident": (after["VmHWM"] - before["RssAnon"] - before["RssFile"]) / own_bytes,
        "s_per_gb": time_s / (own_bytes / 1e9),
    }


def _is_held(megatron_name: str, layers: range) -> bool:
    number = next((part for part in megatron_name.split(".") if part.isdigit()), None)
    last = megatron_name.startswith(("decoder.final", "output_layer")) and len(layers) < CONFIG["num_hidden_layers"]
    return not last if number is None else int(number) in layers


def _fill_whole(parameters: dict[str, Any], table: Any, source: Path, cut: dict[str, int]) -> None:
    from contextlib import ExitStack

    from safetensors import safe_open

    from slime.weights.hf_shards import load_shard

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, framework="pt")) for f in sorted(source.glob("*.safetensors"))]
        of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name, parameter in parameters.items():
            parameter.copy_(load_shard(table, name, lambda n: of[n].get_tensor(n), **cut))


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Measures each rank in a child process."""
    for name in RANKS:
        command = [sys.executable, "-m", "benchmarks.loading", "--folder", str(folder), "--rank", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        yield json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Prints the table; returns 1 if a rank of slime needs more than `LIMIT`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; default: a temporary folder")
    parser.add_argument("--rank", choices=RANKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(measure(options.folder, options.rank)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "fp8").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
        print(f"{'rank':28} {'shard GB':>8} {'anonymous':>10} {'file':>6} {'resident':>9} {'s per GB':>9}")
        table = []
        for row in rows(folder):
            table.append(row)
            numbers = f"{row['anonymous']:10.2f} {row['file']:6.2f} {row['resident']:9.2f} {row['s_per_gb']:9.2f}"
            print(f"{row['rank']:28} {row['shard_gb']:8.2f} {numbers}", flush=True)
    print(json.dumps(table))
    return int(any(row["resident"] > LIMIT for row in table if "whole" not in row["rank"]))


if __name__ == "__main__":
    sys.exit(main())
