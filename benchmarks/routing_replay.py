"""Router replay (R3) with a real engine: does the trainer use the engine's experts, and how much closer is it?

python -m benchmarks.routing_replay --shape 30b-a3b-6l --dtype bfloat16 --out r3.json       on a GPU
python -m benchmarks.routing_replay --shape tiny-moe --device cpu --responses 64            a minute, anywhere

An engine with random weights samples through the client. The trainer then evaluates these tokens with the same weights,
with its own choice of experts and with the engine's. Every choice of every router is compared with the engine's record.
Prints one JSON record: sampled tokens, compared and equal choices (a choice is the set of experts of a token in a
layer), the fraction in which the trainer's router alone would choose a different set, both log-prob differences, and
the record's bytes per token. The exit status is 1 if a replayed choice differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.random_checkpoint import write
from benchmarks.training.shapes import SHAPES

ENGINE = {"enable_return_routed_experts": True}
ON_GPU = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.3}
GAP, CHANGED = "train/train_rollout_logprob_abs_diff", "train/routing_changed"
DTYPES = {"bfloat16": "--bf16", "float32": "--no-bf16"}


def sampled(checkpoint: Path, options: argparse.Namespace, folder: Path) -> Any:
    """Samples a `TrainBatch` of responses at temperature 1, with the engine's record of each."""
    import numpy as np

    from slime.core.batch import TrainBatch, TrainSample
    from slime.core.routed_experts import ExpertFormat
    from slime.core.sample import Sample
    from slime.rollout.client.engine_client import EngineClient
    from slime.serving.leased_ports import request
    from slime.serving.server import ServerSpec, SGLangServer

    config = SHAPES[options.shape]
    topk, layers = config["num_experts_per_tok"], config["num_hidden_layers"]
    experts = ExpertFormat(config["num_experts"], topk, sparse=(True,) * layers)
    rng = np.random.default_rng(7)
    lengths = rng.integers(16, 64, options.responses).tolist()
    prompts = [rng.integers(3, config["vocab_size"], length).tolist() for length in lengths]
    samples = [Sample(group_index=i // 2, index=i, tokens=ids) for i, ids in enumerate(prompts)]
    params = {"temperature": 1.0, "max_new_tokens": options.length, "ignore_eos": True}

    async def ask(url: str) -> None:
        client = EngineClient(url, request_timeout_s=600, experts=experts)

        async def one(sample: Sample) -> None:
            made = await client.generate(sample.tokens, params, experts_from=0)
            sample.append_response_tokens(
                made.tokens,
                log_probs=made.log_probs,
                weight_version=made.weight_version,
                routed_experts=made.routed_experts,
            )

        try:
            await asyncio.gather(*map(one, samples))
        finally:
            await client.close()

    extra = ENGINE | (ON_GPU if options.device == "cuda" else {})
    spec = ServerSpec(str(checkpoint), dtype=options.dtype, device=options.device, extra=extra)
    server = SGLangServer(spec, log_path=folder / "engine.log")
    try:
        server.start()
        server.wait_ready(timeout_s=600)
        version = {"new_version": "1", "abort_all_requests": False}
        request("POST", f"{server.url}/update_weight_version", version, timeout_s=30)
        asyncio.run(ask(server.url))
    finally:
        server.stop()
    made = tuple(TrainSample.from_sample(s, reward=float(rng.normal())) for s in samples)
    return TrainBatch(rollout_id=0, samples=made)


@contextlib.contextmanager
def watched(backend: Any) -> Iterator[dict[int, list[Any]]]:
    """Yields layer -> the sets of experts [T, E] bool of each call of its router in the block."""
    from slime.models.common.mlp import ExactRouter

    seen: dict[int, list[Any]] = {}
    routers = [m for chunk in backend._trainable.chunks for m in chunk.modules() if isinstance(m, ExactRouter)]
    hooks = [
        r.register_forward_hook(lambda r, _, out: seen.setdefault(r.layer_number - 1, []).append(out[1].cpu()))
        for r in routers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compared(batch: Any, seen: dict[int, list[Any]]) -> tuple[int, int]:
    """Returns (choices compared, choices equal) over all samples and layers, without the last token of a sample."""
    import numpy as np

    num, equal = 0, 0
    for layer, calls in seen.items():
        for sample, chosen in zip(batch.samples, calls, strict=True):
            wanted = np.zeros((sample.num_tokens - 1, chosen.shape[-1]), np.bool_)
            np.put_along_axis(wanted, sample.routed_experts[:, layer].astype(np.int64), True, axis=1)
            num += len(wanted)
            equal += int((chosen.numpy()[: len(wanted)] == wanted).all(axis=1).sum())
    return num, equal


def trained(checkpoint: Path, batch: Any, options: argparse.Namespace, folder: Path, *, replay: bool) -> dict[str, Any]:
    """Returns the metrics of a training call with learning rate 0, and the number of choices equal to the engine's."""
    from slime.settings import parse_args
    from slime.training.backend import MegatronBackend
    from slime.weights.rendezvous import listen_on

    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "unused", "label": "unused"}\n')
    words = f"--hf-checkpoint {checkpoint} --prompt-data {prompts} --device {options.device} --colocate --num-rollout 1"
    words += f" --rm-type math --lr 0 --rollout-batch-size {options.responses // 2} --n-samples-per-prompt 2"
    words += f" --rollout-max-response-len {options.length} --micro-batch-size 1 --mismatch-limit 1e9"
    words += f" {DTYPES[options.dtype]}" + (" --use-rollout-routing-replay" if replay else "")
    listener = listen_on("127.0.0.1")
    backend = MegatronBackend(
        parse_args(words.split()),
        rank=0,
        world_size=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=listener.getsockname()[1],
        listener=listener,
    )
    backend.weight_version = 1
    with watched(backend) as seen:
        metrics = backend.train(batch)
    backend.close()
    num, equal = compared(batch, seen)
    return {"choices": num, "choices_equal": equal, "metrics": metrics}


def main() -> int:
    """Prints the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sparse = [name for name, config in SHAPES.items() if "num_experts" in config]
    parser.add_argument("--shape", choices=sparse, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--responses", type=int, default=128, help="an even number")
    parser.add_argument("--length", type=int, default=96, help="tokens of a response")
    parser.add_argument("--checkpoint", type=Path, help="a folder with that shape; default: random weights")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    options = parser.parse_args()
    if options.responses < 2 or options.responses % 2:
        parser.error(f"got --responses {options.responses}; groups have two, so give an even number")
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as temporary:
        folder = Path(temporary)
        checkpoint = options.checkpoint or folder / "model"
        if options.checkpoint is None:
            write(checkpoint, options.shape, None)
        batch = sampled(checkpoint, options, folder)
        off, on = (trained(checkpoint, batch, options, folder, replay=replay) for replay in (False, True))
    record = {
        "command": f"python -m benchmarks.routing_replay {' '.join(sys.argv[1:])}",
        "shape": options.shape,
        "device": options.device,
        "dtype": options.dtype,
        "tokens_sampled": sum(s.response_length for s in batch.samples),
        "routing_changed": off["metrics"][CHANGED],
        "bytes_per_token": on["metrics"]["train/routing_bytes_per_token"],
        "mean_log_prob_difference": {"own choice": off["metrics"][GAP], "replayed": on["metrics"][GAP]},
        "own choice": off,
        "replayed": on,
    }
    print(json.dumps(record))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not on["choices"] or on["choices_equal"] != on["choices"])


if __name__ == "__main__":
    sys.exit(main())
