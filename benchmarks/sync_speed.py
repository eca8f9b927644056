"""Weight syncs to an engine on another GPU: announced buckets, one call per bucket, and a bare broadcast of the bytes.

    python -m benchmarks.sync_speed --shape 4b --out sync_speed.json            needs two GPUs
    python -m benchmarks.sync_speed --shape tiny-moe --device cpu --out sync_speed.json

One training rank holds all tensors of the model in the engines' dtype, with random contents, and sends them with the
`distributed` transport (NCCL on GPUs, gloo on a CPU). Both ways of calling the engine alternate, with the same engine
and the same buckets, and every sync is verified. `--bucket-mib` can be repeated: the engine stays. Before that, two
processes broadcast buffers of the same sizes and do nothing else. Rates count the bytes of the model once. Gathering
shards from other training ranks is not included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_checkpoint import tensors_of, write
from benchmarks.training.shapes import SHAPES
from slime.cluster.launch_run import NCCL
from slime.core.topology import EngineLayout
from slime.models import table_for
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest, serialize_bucket, shareable, warm_digest
from slime.serving.server import ServerSpec, SGLangServer
from slime.weights.receivers import Peers, Receiver
from slime.weights.recorded_fills import RecordedFills
from slime.weights.send_plan import Buffers
from slime.weights.sync import sync_weights
from slime.weights.transports import TransportContext
from slime.weights.transports.distributed import DistributedChannel
from tests.support.engines import READY_LIMIT_S
from tests.support.tiny import write_tokenizer
from tests.support.weights import Whole

FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_custom_all_reduce": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 8192,
}
WAYS = {"announced": True, "one call per bucket": False}
TIMES = 5
LIMIT_S = 120.0


def broadcast_bytes(rank: int, port: int, sizes: list[int], device: str, out: str) -> None:
    """One of two processes that broadcast buffers of these sizes. Rank 0 writes the seconds of each round to `out`."""
    import torch.distributed as dist

    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    backend, url = "nccl" if device == "cuda" else "gloo", f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    memory = torch.empty(max(sizes), dtype=torch.uint8, device=place)
    seconds = []
    for _ in range(TIMES + 2):
        dist.barrier()
        began = time.perf_counter()
        for size in sizes:
            dist.broadcast(memory[:size], src=0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps(seconds[2:]))
    dist.destroy_process_group()


def bare(sizes: list[int], device: str, folder: Path) -> list[float]:
    from torch.multiprocessing.spawn import spawn

    from slime.weights.rendezvous import listen_on

    with listen_on("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    spawn(broadcast_bytes, (port, sizes, device, str(folder / "bare.json")), nprocs=2)
    found: list[float] = json.loads((folder / "bare.json").read_text())
    return found


class Sender:
    """A training rank that holds the whole model, and the engine that it sends to."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.device = options.device
        config = SHAPES[options.shape]
        self.table = table_for(config)
        state = {name: tensor.to(self.device) for name, tensor in tensors_of(config, seed=0)}
        self.outgoing = Whole(self.table, state.items())
        self.bare = {mib: bare(self.sizes(mib), self.device, folder) for mib in options.bucket_mib}
        write(folder / "model", options.shape, None, seed=1)
        write_tokenizer(folder / "model")
        layout = EngineLayout(tp_size=options.tp)
        gpus = tuple(str(1 + n) for n in range(options.tp)) if self.device == "cuda" else None
        flags = FLAGS if self.device == "cuda" else {}
        spec = ServerSpec(str(folder / "model"), "bfloat16", self.device, layout, gpu_ids=gpus, extra=flags)
        self.server = SGLangServer(spec, log_path=options.out.with_suffix(".log"))
        self.server.start()
        self.server.wait_ready(READY_LIMIT_S)
        if self.device == "cuda":
            warm_digest(torch.device("cuda", 0))
        self.receiver = Receiver(HttpEngineControl(self.server.url, layout, timeout_s=LIMIT_S))
        context = TransportContext(
            peers=Peers(),
            device=self.device,
            gpu_id=None,
            address="127.0.0.1",
            timeout_s=LIMIT_S,
            table=self.table,
            hf_checkpoint=folder / "model",
            serialize=serialize_bucket,
            shareable=shareable,
        )
        self.channel = DistributedChannel(context)
        self.versions = itertools.count(1)
        self.use(options.bucket_mib[0])

    def sizes(self, mib: int) -> list[int]:
        """Bytes of each bucket."""
        return [turn.num_bytes for turn in self.outgoing.turns(mib * 2**20)]

    def use(self, mib: int) -> None:
        """Makes all further weight syncs use buckets of this size."""
        self.bucket_bytes = mib * 2**20
        self.buffers = Buffers(lambda size: self.channel.allocate(size, torch.device(self.device)))
        self.fills = RecordedFills(on=True)

    def sync(self, *, announced: bool) -> dict[str, float]:
        """Runs one verified weight sync and returns its times in seconds."""
        if self.channel._group is not None:
            self.channel._streams = announced
        found = sync_weights(
            self.outgoing,
            receivers=[self.receiver],
            channel=self.channel,
            digest=digest,
            version=next(self.versions),
            buffer_bytes=self.bucket_bytes,
            buffers=self.buffers,
            fills=self.fills,
        )
        return {name.removeprefix("update_weights_"): value for name, value in found.items() if name.endswith("_time")}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the results by bucket size in MiB."""
    sender, found = Sender(options, folder), {}
    try:
        for mib in options.bucket_mib:
            sender.use(mib)
            rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(TIMES + 2):
                for way, announced in WAYS.items():
                    rounds[way].append(sender.sync(announced=announced))
            found[str(mib)] = summary(rounds, sender.sizes(mib), sender.bare[mib])
    finally:
        sender.channel.close()
        sender.server.stop()
    return {
        "command": f"python -m benchmarks.sync_speed --shape {options.shape}"
        + "".join(f" --bucket-mib {mib}" for mib in options.bucket_mib),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "bucket_mib": found,
    }


def summary(rounds: dict[str, list[dict[str, float]]], sizes: list[int], bare: list[float]) -> dict[str, Any]:
    num_bytes, best = sum(sizes), statistics.median(bare)
    ways = {
        way: {name: statistics.median(one[name] for one in kept[2:]) for name in kept[0]}
        for way, kept in rounds.items()
    }
    return {
        "bytes": num_bytes,
        "buckets": len(sizes),
        "bare broadcast": {"s": best, "GB/s": num_bytes / best / 1e9},
        "medians": {way: {**one, "share of the bare broadcast": best / one["send_time"]} for way, one in ways.items()},
        "rounds": {**rounds, "bare broadcast": bare},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine, each on a GPU of its own")
    parser.add_argument("--bucket-mib", type=int, action="append", help="may be repeated; default 512")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.bucket_mib = options.bucket_mib or [512]
    os.environ.update(NCCL)  # what engines use; the first broadcast fails if the sender differs
    with tempfile.TemporaryDirectory() as folder:
        result = measured(options, Path(folder))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for mib, one in result["bucket_mib"].items():
        print(mib, json.dumps({name: value for name, value in one.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
