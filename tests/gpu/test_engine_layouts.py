"""Engines of every layout on two GPUs: they start, take weights, hold what the trainer says on each rank, and serve it.

python -m pytest -s tests/gpu/test_engine_layouts.py

All engines start side by side (small models, little memory each). The test plays a trainer of two ranks, one on each
GPU, in two threads: each hands its GPU's engine ranks the memory of its own tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from slime.core.errors import WeightSyncError
from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineLayout
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.serving.control import HttpEngineControl
from slime.serving.payloads import digest, serialize_bucket, warm_digest
from slime.serving.server import ServerSpec, SGLangServer
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from slime.weights.transports import TRANSPORTS
from tests.gpu.conftest import Figure
from tests.support.tiny import write_tiny_model
from tests.support.weights import Ranks, TamperingChannel, Whole, disk_settings, transport_context

GPUS = (0, 1)
pytestmark = [pytest.mark.two_gpus, pytest.mark.timeout(400)]
START_LIMIT_S = 300.0
SYNC_LIMIT_S = 120.0
"""Of a training rank's wait for the other one, which compiles what it takes digests with."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
}
"""Little memory, and nothing that is compiled for long."""
CASES: dict[str, tuple[str, EngineLayout, dict[str, Any]]] = {
    "TP 2": ("qwen3", EngineLayout(tp_size=2), {}),
    "EP 2": ("qwen3_moe", EngineLayout(tp_size=2, ep_size=2), EXPERTS),
    "DP attention 2": ("qwen3_moe", EngineLayout(tp_size=2, dp_size=2), EXPERTS),
    "DP attention 2, all of it": ("qwen3_moe", EngineLayout(tp_size=2, dp_size=2, ep_size=2, dp_lm_head=True), EXPERTS),
    "PP 2": ("qwen3", EngineLayout(pp_size=2), {"tied": True}),
}
PROMPTS = [[2, 40, 41, 42 + i, 43, 44, 45, 46, 47 + i] for i in range(4)]
"""As many as reach both DP groups."""
TAMPERED = "model.layers.2.self_attn.k_proj.weight"
MEAN_DIFFERENCE = 0.05
"""Of log-probs in bfloat16 to those of transformers in float32, in nats; wrong weights are off by more than one."""
StateDict = dict[str, torch.Tensor]


@dataclass
class Case:
    """One engine, its model, and how long it took to start."""

    server: SGLangServer
    path: Path
    layout: EngineLayout
    started_at: float
    ready_s: float = 0.0

    @property
    def table(self) -> FamilyTable:
        return table_for(read_hf_config(str(self.path)))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    root = tmp_path_factory.mktemp("layouts")
    found: dict[str, Case] = {}
    try:
        for number, (name, (family, layout, own)) in enumerate(CASES.items()):
            folder = root / str(number)
            path = write_tiny_model(folder / "model", family, seed=number, **SIZES, **own)
            spec = ServerSpec(
                model_path=str(path),
                dtype="bfloat16",
                device="cuda",
                layout=layout,
                extra=FLAGS,
            )
            server = SGLangServer(spec, log_path=folder / "engine.log")
            server.start()
            found[name] = Case(server, path, layout, time.monotonic())
        for gpu in GPUS:  # here, because two threads that import and compile the same for the first time may never end
            with torch.cuda.device(gpu):
                warm_digest(torch.device("cuda", gpu))
                serialize_bucket([("warm", torch.zeros(1, device="cuda"))], 1)
        yield found
    finally:
        with ThreadPoolExecutor(len(CASES)) as pool:
            list(pool.map(lambda case: case.server.stop(), found.values()))


def ready(case: Case) -> None:
    """Waits for it; says how long it took, or how its log ends."""
    case.server.wait_ready(timeout_s=START_LIMIT_S)
    case.ready_s = case.ready_s or time.monotonic() - case.started_at


def changed(case: Case, seed: int) -> StateDict:
    """Other weights than the engine started with, in bfloat16, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    state, table = load_file(case.path / "model.safetensors"), case.table
    return {n: (state[n] + 0.02 * torch.randn(state[n].shape, generator=generator)).bfloat16() for n in table.hf_names}


def sync(case: Case, state: StateDict, name: str, version: int, folder: Path, tamper: Any = None) -> dict[str, float]:
    """One weight sync by both training ranks."""
    uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in GPUS]
    control = HttpEngineControl(case.server.url, case.layout, timeout_s=60)
    peers, settings = (
        Ranks(len(GPUS), limit_s=SYNC_LIMIT_S),
        disk_settings(folder),
    )

    def rank(number: int) -> dict[str, float]:
        torch.cuda.set_device(number)
        context = transport_context(
            peers=peers.peers(number),
            device="cuda",
            gpu_id=uuids[number],
            table=case.table,
            hf_checkpoint=case.path,
        )
        channel = TRANSPORTS.build(name, settings).open(context)
        try:
            return sync_weights(
                Whole(case.table, ((n, t.to(f"cuda:{number}")) for n, t in state.items()), rank=number),
                receivers=[Receiver(control, tuple(uuids))],
                channel=channel if tamper is None else TamperingChannel(channel, tamper),
                digest=digest,
                version=version,
                buffer_bytes=1 << 20,
                peers=context.peers,
            )
        finally:
            channel.close()

    with ThreadPoolExecutor(len(GPUS)) as pool:
        told = [future.result() for future in [pool.submit(rank, number) for number in GPUS]]
    control.close()
    return told[0]


def reference(case: Case, state: StateDict) -> torch.Tensor:
    """[prompts, T-1] log-probs of each token but the first, under transformers in float32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(case.path)
    kind = getattr(transformers, config.architectures[0])
    whole = {n: t.float() for n, t in state.items()}
    model = kind.from_pretrained(None, config=config, state_dict=whole, dtype=torch.float32).to("cuda:0")
    tokens = torch.tensor(PROMPTS, device="cuda:0")
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].cpu()


def served(case: Case) -> tuple[torch.Tensor, set[str], set[int]]:
    """The same of the engine, with the weight versions and the lengths of what it answered."""

    def ask(prompt: list[int]) -> Any:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return httpx.post(f"{case.server.url}/generate", json=body, timeout=120).raise_for_status().json()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, PROMPTS))
    log_probs = [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]
    versions = {answer["meta_info"]["weight_version"] for answer in answers}
    return torch.tensor(log_probs), versions, {len(answer["output_ids"]) for answer in answers}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_this_layout_serves_what_it_was_sent(
    cases: dict[str, Case], name: str, tmp_path: Path, figure: Figure
) -> None:
    case = cases[name]
    try:
        ready(case)
        control = HttpEngineControl(case.server.url, case.layout, timeout_s=60)
        ranks = [(str(report.rank), str(report.layout), len(report.checksums)) for report in control.weight_checksums()]
        control.close()
        print(
            f"\n{name} ({case.layout}): ready after {case.ready_s:.0f} s; (rank, layout, tensors): {ranks}", flush=True
        )
        for version, transport in ((2, "tensor"), (3, "disk"), (4, "tensor")):
            state = changed(case, version)
            costs = sync(case, state, transport, version, tmp_path / "disk")
            got, versions, lengths = served(case)
            gap = (got - reference(case, state)).abs()
            print(
                f"{name}, {transport}: verified in {costs['update_weights_verify_time']:.3f} s of "
                f"{costs['update_weights_time']:.3f} s, log-probs off by {gap.mean():.4f} (worst {gap.max():.3f})",
                flush=True,
            )
            figure("mean nats", float(gap.mean()))
            figure("sync s", costs["update_weights_time"])
            assert versions == {str(version)} and lengths == {8}
            assert gap.mean() < MEAN_DIFFERENCE, f"{transport}: {gap}"
    except Exception:
        print(f"\n{name}: the log ends with\n{case.server.log_tail()}", flush=True)
        raise


@pytest.mark.parametrize("name", CASES)
def test_one_altered_number_is_found_on_the_rank_that_holds_it(
    cases: dict[str, Case], name: str, tmp_path: Path
) -> None:
    case = cases[name]
    ready(case)

    def one_number(tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor_name == TAMPERED:
            tensor.view(-1)[7] += 1.0
        return tensor

    with pytest.raises(WeightSyncError) as caught:
        sync(case, changed(case, 5), "tensor", 5, tmp_path / "disk", one_number)
    message = str(caught.value)
    print(f"\n{name}: {message[:300]}", flush=True)
    assert TAMPERED in message and "missing" not in message and "extra" not in message
    assert ("of stage 1: differing" in message) == (case.layout.pp_size > 1)
    sync(case, changed(case, 6), "tensor", 6, tmp_path / "disk")  # the way out: sync again
    assert served(case)[1] == {"6"}
