"""Quantised engines on a GPU: synced, verified against SGLang's own loading of the same tensors, and served.

python -m benchmarks.quantised --out results.json [--cases "0.6b fp8" ...]

For each case two engines with random weights start side by side: one from other weights, which is then synced, and one
from a folder with the tensors that the sync sends. They must have the same digests and the same answers, to the last
bit of their log-probs, and every flipped bit must be found. Also measures how far log-probs are from those of the plain
and of the fake-quantised weights, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.random_checkpoint import tensors_of
from benchmarks.training.shapes import SHAPES
from slime.core.errors import WeightSyncError
from slime.models import table_for
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest, serialize_bucket, shareable, warm_digest
from slime.serving.server import ServerSpec, SGLangServer
from slime.weights.quantised import formats
from slime.weights.quantised.formats import engine_table, format_of
from slime.weights.quantised.sending import quantised_outgoing, quantised_stream
from slime.weights.receivers import Peers, Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports import Channel, TransportContext
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.tensor import TensorTransport
from tests.support.quantised import FP8, float_quantized, int4
from tests.support.tiny import write_tokenizer
from tests.support.weights import TamperingChannel, Whole

FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "cuda_graph_max_bs": 4,
    "disable_prefill_cuda_graph": True,
}
"""Disables prefill graphs, which take a minute and a half to compile in 58 sizes."""
START_LIMIT_S = 280.0
PROMPTS, LENGTH, ANSWER = 8, 128, 32
SHARPER = 5.0
"""Factor of the embedding, so that the next token is not uniformly distributed."""
CASES: dict[str, tuple[str, str, int]] = {
    "0.6b int4": ("0.6b", "int4", 4),
    "30b-a3b-6l int4": ("30b-a3b-6l", "int4", 2),
    "0.6b channels": ("0.6b", "channels", 10),
    "0.6b fp8": ("0.6b", "fp8", 25),
    "30b-a3b-6l fp8": ("30b-a3b-6l", "fp8", 5),
}
"""Name -> shape, format, number of flipped bits. Cases that compile for long start first."""
State = dict[str, torch.Tensor]


def weights_of(config: dict[str, Any], seed: int) -> State:
    """Returns random bfloat16 weights on the GPU."""
    state = {n: t.cuda() for n, t in tensors_of(config, seed=seed)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            state[name] *= SHARPER
    return state


@dataclass
class Case:
    """Two engines with one shape and format."""

    shape: dict[str, Any]
    """config.json of the plain model."""
    kind: str
    """"fp8", "channels" or "int4"."""
    folder: Path
    logs: Path
    flips: int

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = dict(self.shape)
        self.plain = table_for(self.config)
        kept = [n for n in self.plain.hf_names if n.endswith(".weight") and not formats.quantises(n)]
        modules = [n.removesuffix(".weight") for n in kept if "norm" not in n]
        entry = {
            "fp8": {**FP8, "modules_to_not_convert": modules},
            "channels": float_quantized(modules),
            "int4": int4(128, modules),
        }[self.kind]
        mark = {"fp8": "weight_scale_inv", "channels": "weight_scale", "int4": "weight_packed"}[self.kind]
        quantised = [n.removesuffix("weight") + mark for n in self.plain.hf_names if formats.quantises(n)]
        found = format_of({"quantization_config": entry}, [*self.plain.hf_names, *quantised])
        assert found is not None
        self.format, self.table = found, engine_table(self.plain, found)
        self.config["quantization_config"] = entry

    def start(self) -> None:
        """Writes both folders and starts both engines."""
        self.servers = {}
        for name, seed in (("synced", 1), ("loaded", 2)):
            folder = self.folder / name
            self._write(folder, weights_of(self.shape, seed))
            spec = ServerSpec(model_path=str(folder), dtype="bfloat16", device="cuda", extra=FLAGS)
            server = SGLangServer(spec, log_path=self.logs / f"{self.folder.name}-{name}.log")
            server.start()
            self.servers[name] = server
        self.started = time.monotonic()

    def _write(self, folder: Path, state: State) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        tensors = {n: t.cpu() for n, t in quantised_stream(state.items(), self.format)}
        if self.kind == "int4":
            for name in self.format.names:
                tensors[name + "_shape"] = torch.tensor(state[name].shape)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        write_tokenizer(folder)  # the benchmark decodes no text

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


class Trainer:
    """A training rank's part of a weight sync, on this GPU."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.gpu = case, str(torch.cuda.get_device_properties(0).uuid)
        self.transports = {"disk": DiskTransport(update_weight_disk_dir=str(folder)), "tensor": TensorTransport()}
        server = case.servers["synced"]
        self.control = HttpEngineControl(server.url, server.spec.layout, timeout_s=120)
        self.context = TransportContext(
            peers=Peers(),
            device="cuda",
            gpu_id=self.gpu,
            address="127.0.0.1",
            timeout_s=120.0,
            table=case.table,
            hf_checkpoint=Path(server.model_path),
            serialize=serialize_bucket,
            shareable=shareable,
        )

    def sync(self, state: State, version: int, transport: str = "tensor", tamper: Any = None) -> dict[str, float]:
        """Runs one verified weight sync."""
        channel: Channel = self.transports[transport].open(self.context)
        try:
            return sync_weights(
                quantised_outgoing(Whole(self.case.plain, state.items()), self.case.format),
                receivers=[Receiver(self.control, (self.gpu,))],
                channel=channel if tamper is None else TamperingChannel(channel, tamper),
                digest=digest,
                version=version,
                buffer_bytes=512 * 2**20,
            )
        finally:
            channel.close()


def flipped(name: str, bit: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Flips one bit of one tensor before it is sent."""

    def flip(tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor_name == name:
            tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        return tensor

    return flip


def caught(trainer: Trainer, state: State, number: int) -> Iterator[dict[str, Any]]:
    """Syncs with a flipped bit; returns the tensor, and whether the weight sync failed with its name."""
    generator = torch.Generator().manual_seed(3)
    sizes = {n: t.nbytes for n, t in quantised_stream(state.items(), trainer.case.format)}
    names, residents = list(sizes), trainer.case.table.resident_of
    scales = [n for n in names if "scale" in n]
    for i in range(number):
        pool = scales if i % 2 else names
        name = pool[int(torch.randint(len(pool), (), generator=generator))]
        bit, resident = int(torch.randint(8 * sizes[name], (), generator=generator)), residents[name]
        try:
            trainer.sync(state, 100 + i, tamper=flipped(name, bit))
            yield {"tensor": name, "bit": bit, "caught": False}
        except WeightSyncError as error:
            yield {"tensor": name, "bit": bit, "caught": True, "named": resident in str(error)}


def prompts(vocab: int) -> torch.Tensor:
    return torch.randint(100, vocab, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(4))


def served(url: str, tokens: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """Returns the log-probs of prompts [prompts, T-1], and the engine's greedy responses with log-probs."""
    rows, answers = [], []
    for prompt in tokens.tolist():
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()["meta_info"]
        rows.append([entry[0] for entry in meta["input_token_logprobs"][1:]])
        answers.append([entry[:2] for entry in meta["output_token_logprobs"]])
    return torch.tensor(rows), answers


def reference(config: dict[str, Any], state: State, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs of prompts from transformers in bfloat16."""
    import transformers

    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    made = transformers.AutoConfig.for_model(**plain)
    kind = getattr(transformers, plain["architectures"][0])
    model = kind.from_pretrained(None, config=made, state_dict=dict(state), dtype=torch.bfloat16).cuda().eval()
    rows = []
    with torch.no_grad():
        for row in tokens.cuda():
            log_probs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
            rows.append(log_probs.gather(1, row[1:, None])[:, 0].cpu())
    return torch.stack(rows)


def differences(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    gap = (got - want).abs()
    return {"mean": gap.mean().item(), "p99": gap.flatten().quantile(0.99).item(), "worst": gap.max().item()}


def alone(case: Case, state: State) -> dict[str, float]:
    """Returns the seconds and the peak GB of quantising all weights, without sending them."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.monotonic()
        num_bytes = sum(t.nbytes for _, t in quantised_stream(state.items(), case.format))
        torch.cuda.synchronize()
        took = time.monotonic() - began
    peak = torch.cuda.max_memory_allocated() - before
    plain = sum(t.nbytes for t in state.values())
    return {"time_s": took, "peak_gb": peak / 1e9, "plain_gb": plain / 1e9, "quantised_gb": num_bytes / 1e9}


def measure(case: Case, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the results of one case as they become known."""
    for server in case.servers.values():
        server.wait_ready(timeout_s=START_LIMIT_S)
    yield "ready_s", time.monotonic() - case.started
    state, trainer = weights_of(case.shape, 2), Trainer(case, folder)
    yield "quantising", alone(case, state)
    loaded = HttpEngineControl(case.servers["loaded"].url, case.servers["loaded"].spec.layout, timeout_s=120)
    want = loaded.weight_checksums()[0].checksums
    yield "resident_tensors", len(want)
    before = trainer.control.weight_checksums()[0].checksums
    yield "differing_before", sum(before.get(n) != d for n, d in want.items())
    for turn, transport in enumerate(("tensor", "tensor", "disk", "tensor")):
        if turn == 2:  # sync different weights in between
            trainer.sync(weights_of(case.shape, 5), 10 + turn)
        costs = trainer.sync(state, 20 + turn, transport)
        got = trainer.control.weight_checksums()[0].checksums
        yield (
            f"sync_{turn}_{transport}",
            {**costs, "differs_from_loaded": [n for n in want if got.get(n) != want[n]][:4]},
        )
    tokens = prompts(case.config["vocab_size"])
    of_synced, answers = served(case.servers["synced"].url, tokens)
    of_loaded, others = served(case.servers["loaded"].url, tokens)
    yield "log_probs_equal_loaded", bool(torch.equal(of_synced, of_loaded))
    yield "log_probs_to_loaded", differences(of_synced, of_loaded)
    yield "answers_equal_loaded", answers == others
    plain = reference(case.config, state, tokens)
    fake = {n: case.format.fake(t) if n in case.format.names else t for n, t in state.items()}
    quantised = reference(case.config, fake, tokens)
    yield "mean_log_prob", of_synced.mean().item()
    yield "engine_to_plain_weights", differences(of_synced, plain)
    yield "engine_to_fake_quantised_weights", differences(of_synced, quantised)
    yield "plain_to_fake_quantised_weights", differences(plain, quantised)
    flips = list(caught(trainer, state, case.flips))
    yield "flipped_bits", {"tried": len(flips), "caught": sum(f["caught"] for f in flips), "all": flips}
    costs = trainer.sync(state, 200)
    yield "answers_equal_after_healing", served(case.servers["synced"].url, tokens)[1] == others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs; default: a temporary folder")
    options = parser.parse_args()
    command = f"python -m benchmarks.quantised --out {options.out.name}"
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "command": command, "cases": {}}
    root, cases = Path(tempfile.mkdtemp()), {}
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name in options.cases:
        shape, kind, flips = CASES[name]
        folder = root / name.replace(" ", "_")
        cases[name] = Case(SHAPES[shape], kind, folder, options.logs or root, flips)
        cases[name].start()
        print(f"{time.monotonic() - began:6.1f} s: started {name}", flush=True)
    warm_digest(torch.device("cuda"))
    for name in reversed(options.cases):
        told = results["cases"][name] = {}
        try:
            for key, value in measure(cases[name], root / "disk"):
                told[key] = value
                options.out.write_text(json.dumps(results, indent=1))
                print(f"{time.monotonic() - began:6.1f} s: {name}: {key} {str(value)[:300]}", flush=True)
        except Exception:
            told["failure"] = traceback.format_exc()[-3000:]
            print(told["failure"], flush=True)
            for which, server in cases[name].servers.items():
                print(f"--- {which} ends with\n{server.log_tail()[-3000:]}", flush=True)
        options.out.write_text(json.dumps(results, indent=1))
        cases[name].stop()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
