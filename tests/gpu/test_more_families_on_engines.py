"""Families whose engines a CPU serves otherwise or not at all, on one GPU in bfloat16: after a verified weight sync the
engine's log-probs are those of the trainer in float32, but for rounding.

python -m pytest -s tests/gpu/test_more_families_on_engines.py
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime.core.batch import TrainBatch
from slime.core.hf_config import read_hf_config
from slime.core.topology import ONE_RANK
from slime.models import table_for
from slime.serving.control import HttpEngineControl
from tests.contract.weights.test_families_on_engines import sync_state
from tests.gpu.conftest import Figure
from tests.support.engine_parity import sampled
from tests.support.engines import serving, spec_of
from tests.support.families import write_family
from tests.support.measured_backend import MeasuredBackend
from tests.support.ranks import Ranks, Seat
from tests.support.training import training_args

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(400)]
FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
}
LATENT: dict[str, Any] = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
"""As released, because engines have kernels for these sizes."""
WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128}
LONG: dict[str, Any] = {"max_position_embeddings": 1024}
SPARSE: dict[str, Any] = {
    **LATENT,
    **WIDE,
    "max_position_embeddings": 4096,
    **{"num_attention_heads": 64, "num_key_value_heads": 64},
    **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
}
"""SGLang's kernels for sparse attention take the released numbers of heads and of selected keys."""
FLASH_MLA: dict[str, Any] = {
    "attention_backend": None,
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "flashmla_sparse",
}
DELTA: dict[str, Any] = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mimo": ({"head_dim": 64}, {}),
    "kimi_k2": ({**LATENT, **LONG, **WIDE}, {}),
    "deepseek_v3": ({**LATENT, **LONG, **WIDE}, {}),
    "glm4_moe_lite": ({**LATENT, **LONG, **WIDE}, {}),
    "glm4_moe": ({"head_dim": 64, **WIDE}, {}),
    "qwen3_next": ({**DELTA, **WIDE}, {}),
    "minimax_m2": ({"head_dim": 64, "intermediate_size": 64}, {}),
    "deepseek_v32": (SPARSE, FLASH_MLA),
    "glm_moe_dsa": (SPARSE, FLASH_MLA),
    "gpt_oss": ({"head_dim": 64, "intermediate_size": 64, **LONG}, {"moe_runner_backend": "triton"}),
}
"""Name -> (sizes that kernels of GPUs take, flags of the engine)."""
MEAN_DIFFERENCE = 0.05
"""In nats; wrong weights are off by more than one."""


def log_probs_on_a_cpu(seat: Seat, checkpoint: Path, batch: TrainBatch) -> Any:
    """Log-probs of all sampled tokens, in float32, one after the other."""
    args = training_args(checkpoint, global_batch_size=24, micro_batch_size=6)
    with contextlib.closing(MeasuredBackend(args, **seat.place)) as backend:
        backend.weight_version = 1
        return np.concatenate([np.asarray(values) for values in backend.log_probs(batch)])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_samples_as_the_trainer_after_a_sync(
    family: str, tmp_path: Path, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, flags = FAMILIES[family]
    if own is SPARSE:
        pytest.importorskip("deep_gemm", reason="SGLang's indexer needs sgl-deep-gemm")
        # Short prompts would use FlashAttention 3, which not every build of sglang-kernel has.
        monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    served, trained = (write_family(tmp_path / f"seed{seed}", family, seed, **own) for seed in (0, 1))
    table = table_for(read_hf_config(str(trained)))
    state = load_file(trained / "model.safetensors")
    sent = (
        (n, state[n].cuda() if table.entry_of_hf(n).row.wide else state[n].bfloat16().cuda()) for n in table.hf_names
    )
    given = {name: value for name, value in {**FLAGS, **flags}.items() if value is not None}
    spec = spec_of(served, dtype="bfloat16", device="cuda", extra=given)
    with serving(spec, tmp_path) as server:
        control = HttpEngineControl(server.url, ONE_RANK, timeout_s=120)
        try:
            sync_state(control, table, sent, version=2)
            batch = sampled(server.url)
        except Exception:
            print(f"{family}: the log ends with\n{server.log_tail()}", flush=True)
            raise
        control.close()
    with Ranks(fresh=True) as ranks:  # a process that has trained on a CPU cannot train on a GPU
        (got,) = ranks.run(log_probs_on_a_cpu, 1, trained, batch)
    by_engine = np.concatenate([np.asarray(s.rollout_log_probs) for s in batch.samples])
    assert np.ptp(by_engine) > 0.5, "tokens likely and unlikely"
    difference = float(np.abs(got - by_engine).mean())
    figure("mean nats", difference)
    print(f"{family}: {difference:.4f} nats on average")
    assert difference < MEAN_DIFFERENCE
