"""Speed and memory of the whole training call: log-probs, forward and backward passes, metrics and the optimizer.

python -m benchmarks.train --shape 4b --mean-length 1024 --mean-length 4096 --profile profiles
python -m benchmarks.train --shape 30b-a3b-6l --layout ep2 --layout tp2              on two GPUs
python -m benchmarks.train --shape 0.6b --tree . --tree old=/path/to/another/checkout    both, one after the other
python -m benchmarks.train --shape tiny --device cpu                                  ten seconds, anywhere

The call is the backend's `train`, as a training actor makes it, with settings from a command line as in a run,
without Ray and engine. Weights are random, in the shape of the model. Samples have lengths like those of rollouts, with
the given mean, and differ in every call. Each combination of shape, layout, round and tree is measured in separate
processes, one per GPU.

Prints one JSON line per combination, and a readable line per length on stderr, and writes all records to `--out`. FLOPs
are per GPU and follow slime's formula (`slime.models.common.flops`: matrix products and causal attention, three forward
passes, without recomputation). `share_of_matrix` is the FLOP rate divided by that of plain bf16 products of 8192 x 8192
matrices before and after, in the same process; `mfu` is the rate divided by the data sheet's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.training.shapes import SHAPES

HERE = Path(__file__).resolve().parents[1]
SIZES = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
}
NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""As in a run."""
POLL_S = 0.2


def layout_of(text: str) -> tuple[int, list[str]]:
    """Returns (number of GPUs, flags) of a layout: "tp2", "pp2", "ep2", "tp2-cp2", ...; "one" is a single GPU."""
    sizes: dict[str, int] = {}
    for part in [] if text == "one" else text.split("-"):
        found = re.fullmatch(r"(tp|cp|pp|ep|dp)(\d+)", part)
        if found is None:
            raise SystemExit(f"--layout {text} is not a layout such as tp2, pp2, ep2, cp2, dp2, tp2-cp2, or one")
        sizes[found[1]] = int(found[2])
    flags = [word for name, flag in SIZES.items() if name in sizes for word in (flag, str(sizes[name]))]
    pipeline = sizes.get("pp", 1)
    dense = sizes.get("tp", 1) * sizes.get("cp", 1) * pipeline * sizes.get("dp", 1)
    return max(dense, sizes.get("ep", 1) * pipeline), flags


def tree_of(text: str) -> tuple[str, Path]:
    """Returns (label, folder) of `--tree [LABEL=]PATH`."""
    label, _, path = text.rpartition("=")
    folder = Path(path).resolve()
    if not (folder / "slime" / "training" / "backend.py").is_file():
        raise SystemExit(f"--tree {text} is not a checkout of slime")
    return label or folder.name, folder


def commit_of(tree: Path) -> str | None:
    """Returns the commit of a checkout, with a + if files differ; None without git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--abbrev=9", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top = subprocess.run([*command[:3], "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if Path(top.stdout.strip()) == tree else None


def combinations(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns the specs in the order of measurement: trees alternate."""
    trees = [tree_of(text) for text in options.tree or [str(HERE)]]
    for shape in options.shape or ["0.6b"]:
        for layout in options.layout or ["one"]:
            world_size, flags = layout_of(layout)
            for turn in range(options.rounds):
                for label, tree in trees:
                    yield {
                        "name": f"{label}-{shape}-{layout}-{options.max_tokens}-{turn}",
                        "tree": str(tree),
                        "label": label,
                        "commit": commit_of(tree),
                        "round": turn,
                        "shape": shape,
                        "model": SHAPES[shape],
                        "layout": layout,
                        "layout_flags": flags,
                        "world_size": world_size,
                        "device": options.device,
                        "dtype": "bfloat16" if options.device == "cuda" else "float32",
                        "mean_lengths": options.mean_length or [1024],
                        "samples": options.samples,
                        "tokens": options.tokens,
                        "max_tokens": options.max_tokens,
                        "recompute": options.recompute,
                        "calls": options.calls,
                        "flags": options.flags,
                        "profile": options.profile and str(Path(options.profile).resolve()),
                        "profile_samples": options.profile_samples,
                    }


def measure(spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Runs all ranks of one combination; returns the record, with `error` if it failed."""
    with tempfile.TemporaryDirectory(prefix="slime-train-") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(spec["model"]))
        (folder / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
        with socket.create_server(("127.0.0.1", 0)) as listener:
            fd, port = listener.fileno(), listener.getsockname()[1]
            (folder / "spec.json").write_text(
                json.dumps({**spec, "folder": temporary, "listener_fd": fd, "port": port})
            )
            started = time.perf_counter()
            failure = _run_ranks(folder / "spec.json", spec["world_size"], fd, limit_s)
        told = [json.loads(file.read_text()) for file in sorted(folder.glob("error_*.json"))]
        result = folder / "result.json"
        record = {
            **{name: value for name, value in spec.items() if name not in ("model", "layout_flags")},
            "num_layers": spec["model"]["num_hidden_layers"],
            "process_s": time.perf_counter() - started,
            "error": (told or [failure])[0],
        }
        return record | (json.loads(result.read_text()) if result.exists() else {"lengths": []})


def _run_ranks(spec: Path, world_size: int, fd: int, limit_s: float) -> str | None:
    """Starts the ranks and waits for them. If one fails, or at the limit, ends the others and returns the reason."""
    command = [sys.executable, "-m", "benchmarks.training.rank", str(spec)]
    environment = NCCL | dict(os.environ)
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=HERE,
            env=environment,
            stdout=sys.stderr,  # stdout is only for records
            pass_fds=(fd,) if rank == 0 else (),
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + limit_s
    try:
        while (codes := [rank.poll() for rank in ranks]).count(None):
            if any(codes):
                time.sleep(2.0)  # the other ranks may have errors, too
                return f"a rank ended with code {next(code for code in codes if code)}"
            if time.monotonic() > deadline:
                return f"not done after {limit_s:.0f} s"
            time.sleep(POLL_S)
        return f"ranks ended with codes {codes}" if any(codes) else None
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def lines_of(record: dict[str, Any]) -> Iterator[str]:
    """Returns the most important results: a line per length, and failures."""
    name = f"{record['label']} {record['shape']} {record['layout']}"
    for length in record["lengths"]:
        peak, profile = length["memory_gb"].get("peak_reserved"), length.get("profile") or {}
        idle, mfu = profile.get("device_idle_share"), length["mfu"]
        yield (
            f"{name}, mean {length['mean_length']}: {length['median_s']:.2f} s "
            f"(the call before {length['warm_up']['seconds']:.1f}), "
            f"{length['tflops']:.3g} TFLOP/s = {length['share_of_matrix']:.1%} of {length['matrix_tflops']:.3g}"
            + (f", MFU {mfu:.1%}" if mfu else "")
            + (f", peak {peak:.1f} GB" if peak else "")
            + (f", idle {idle:.0%}, {profile['kernels_per_pass_and_layer']:.0f} kernels" if idle is not None else "")
        )
    if record["error"]:
        yield f"{name}: {record['error']}"


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; default 0.6b")
    parser.add_argument("--mean-length", action="append", type=int, help="tokens of a sample; may be repeated")
    parser.add_argument("--samples", type=int, help="samples of a call; default: the number that --tokens needs")
    parser.add_argument("--tokens", type=int, default=256 * 1024, help="per call: 256 samples of 1024, 64 of 4096")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--recompute", action="store_true", help="recompute the activations of every layer")
    parser.add_argument("--layout", action="append", help="one, tp2, ep2, cp2, pp2, dp2, tp2-cp2 ...; may be repeated")
    parser.add_argument("--tree", action="append", metavar="[LABEL=]PATH", help="checkouts to measure; default: this")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all trees")
    parser.add_argument("--calls", type=int, default=3, help="measured calls, after one warm-up call")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", metavar="DIR", help="profile smaller calls too; tables of operations go to DIR")
    parser.add_argument("--profile-samples", type=int, help="tokens of a profiled call; default: four micro-batches")
    parser.add_argument("--flags", default="", help="further flags of train.py, in one string")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of one combination")
    parser.add_argument("--out", type=Path, help="a JSON file for all records")
    return parser.parse_args(argv)


def main() -> int:
    """Prints a record per combination; returns 1 if one failed."""
    options = options_of()
    records = []
    for spec in combinations(options):
        records.append(measure(spec, options.limit_s))
        print(json.dumps(records[-1]), flush=True)
        for line in lines_of(records[-1]):
            print(line, file=sys.stderr, flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(records, indent=1) + "\n")
    return int(any(record["error"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
