"""Weight syncs of a model that is split over ranks: memory besides the shards, time, and leaks after hundreds of syncs.

    python -m benchmarks.weight_sync [--syncs 500] [--transports tensor ...] [--output FILE]

Four training ranks (tensor, pipeline and expert parallel 2 each) send a Mixture-of-Experts model with random weights to
two SGLang servers, all on the CPU, with the code of a run. Results for each rank: the largest increase of resident
memory in its second weight sync (the first sync creates threads and connections), its shard, and two buckets. After
many weight syncs: memory, descriptors and threads of each rank and of every process of the engines, and files and bytes
in /dev/shm, compared with those after the first twenty, and memory after every hundred. Every weight sync is verified.
Needs 12 GB of memory. glibc is set to return freed memory immediately (`ALLOCATOR`); otherwise retained memory counts
as resident, here a quarter of two buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.core.topology import ONE_RANK
from slime.serving.server import ServerSpec, SGLangServer
from tests.support.engines import descendants
from tests.support.ranks import Ranks, Seat
from tests.support.tiny import write_tiny_model
from tests.support.training import training_args

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
}
LAYOUT = {f"{kind}_model_parallel_size": 2 for kind in ("tensor", "pipeline", "expert")} | {"sequence_parallel": True}
BUCKET_MIB = 32
WARM_SYNCS, LOOK_SYNCS = 20, 100
TRANSPORTS = ("distributed", "tensor", "disk")
LIMIT_S = 3000.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


def status(name: str, pid: int | str = "self") -> int:
    """Returns a value from /proc/PID/status; kB are converted to bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    number = int(line.split()[1])
    return number * 1024 if line.endswith("kB") else number


def looked(pid: int | str = "self") -> dict[str, int]:
    """Returns memory, descriptors and threads of a process."""
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {"resident_bytes": status("VmRSS:", pid), "descriptors": descriptors, "threads": status("Threads:", pid)}


def shared() -> dict[str, int]:
    """Returns files and bytes in the host's shared memory."""
    sizes = [file.stat().st_size for file in os.scandir("/dev/shm") if file.is_file()]
    return {"shared_files": len(sizes), "shared_bytes": sum(sizes)}


def around(pids: Sequence[int]) -> dict[str, Any]:
    """Measures this process, processes of engines, and the host."""
    return {**looked(), **shared(), "engines": [looked(pid) for pid in pids]}


def send(
    seat: Seat, model: str, folder: str, urls: list[str], pids: list[int], transport: str, bucket: int, syncs: int
) -> dict[str, Any]:
    """Runs one rank with a bucket size; the first rank also measures the processes of the engines."""
    seen = pids if seat.rank == 0 else []
    from slime.cluster.engine_tracker import EngineInfo
    from slime.cluster.rank_weight_sync import RankWeightSync
    from slime.training.backend import MegatronBackend

    settings: dict[str, Any] = {
        "update_weight_transport": transport,
        "update_weight_buffer_size": bucket,
        "update_weight_disk_dir": str(Path(folder) / "disk"),
        "weight_sync_timeout_s": 300.0,
    }
    args = training_args(Path(model), megatron=dict(LAYOUT), **settings)
    vars(args)["sglang"] = {"dtype": "float32"}
    backend = MegatronBackend(args, **seat.place)
    weight_sync = RankWeightSync(args, backend, rank=seat.rank, slots=range(seat.world_size), address="127.0.0.1")
    engines = [EngineInfo(i, url, ONE_RANK, (i,)) for i, url in enumerate(urls)]
    shard = sum(parameter.nbytes for parameter in backend.model.parameters)
    found: dict[str, Any] = {"shard_bytes": shard, "seconds": [], "resident_bytes": []}
    before = 0
    for number in range(1, syncs + 1):
        backend.weight_version = number
        if number == 2:
            weight_sync.free()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
            before = status("VmRSS:")
        began = time.monotonic()
        weight_sync.sync_weights(engines)
        found["seconds"].append(round(time.monotonic() - began, 3))
        if number == 2:
            found["peak_beside_bytes"] = status("VmHWM:") - before
        if number == min(WARM_SYNCS, syncs):
            found["warm"] = around(seen)
        if number % LOOK_SYNCS == 0:
            found["resident_bytes"].append([status("VmRSS:", pid) for pid in ("self", *seen)])
    found["end"] = around(seen)
    weight_sync.close()
    backend.close()
    return found


def measure(
    servers: Sequence[SGLangServer], model: Path, folder: Path, transport: str, bucket: int, syncs: int
) -> dict[str, Any]:
    """Measures all ranks with one transport."""
    urls = [server.url for server in servers]
    pids = [pid for server in servers for pid in (server.pid, *descendants(server.pid))]
    with Ranks() as ranks:
        told = ranks.run(send, 4, str(model), str(folder), urls, pids, transport, bucket, syncs, limit_s=LIMIT_S)
    seconds = sorted(told[0].pop("seconds")[1:]) or [0.0]
    for rank in told[1:]:
        del rank["seconds"]
    most = max(rank["peak_beside_bytes"] for rank in told)
    print(f"{transport}: {most / 2**20:.1f} MiB beside the shards, two buckets are {2 * bucket / 2**20:.0f}")
    return {"median_s": seconds[len(seconds) // 2], "worst_s": seconds[-1], "syncs": syncs, "ranks": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=10, help="weight syncs with each transport, at least two")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_MIB)
    options = parser.parse_args()
    os.environ.update(ALLOCATOR)
    bucket = options.bucket_mib * 2**20
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.weight_sync", *sys.argv[1:]]),
        "bucket_bytes": bucket,
        "transports": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = {**SIZES, **dict.fromkeys(("hidden_size", "moe_intermediate_size"), options.hidden_size)}
        model = write_tiny_model(folder / "model", "qwen3_moe", tied=False, **sizes)
        spec = ServerSpec(str(model), dtype="float32", device="cpu")
        servers = [SGLangServer(spec, log_path=folder / f"engine_{i}.log") for i in range(2)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready(timeout_s=LIMIT_S)
            for transport in options.transports:
                result["transports"][transport] = measure(servers, model, folder, transport, bucket, options.syncs)
        finally:
            for server in servers:
                server.stop()
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
