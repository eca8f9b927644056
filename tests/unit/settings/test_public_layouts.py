"""Law: the engines that people run on several hosts, or wide, pass the rules of layouts and find their places.

The facts of launch scripts that were published: the model's shape, hosts and GPUs of training, engines, and what shapes
these. What is refused for other reasons (speculative decoding, all-to-all backends, quantised weights, families that
are not trained) is not among them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.cluster.placement import EngineDemand, Host, plan_placement
from slime.models import FAMILIES
from slime.settings import parse_args
from slime.settings.args import Passthrough
from slime.settings.groups.engines import ENGINE_RULES as RULES


@dataclass(frozen=True, slots=True)
class Model:
    """What a layout divides."""

    model_type: str
    heads: int
    kv_heads: int
    experts: int = 0
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """What one script asks for."""

    model: Model
    nodes: int
    per_node: int
    width: int
    """GPUs of one engine; 0 without engines."""
    apart: int = 0
    """GPUs of engines; 0: those of training, with colocation."""
    ep_size: int = 1
    dp_size: int = 1
    """With DP attention and a DP output layer, if there are several."""
    whole_dense_mlp: bool = False

    @property
    def sglang(self) -> dict[str, object]:
        dp = {"dp_size": self.dp_size, "enable_dp_attention": True, "enable_dp_lm_head": True}
        dense = {"moe_dense_tp_size": 1} if self.whole_dense_mlp else {}
        return {"ep_size": self.ep_size, **(dp if self.dp_size > 1 else {}), **dense}


SMALL, MIDDLE, LARGE = Model("qwen3", 32, 8, tied=True), Model("qwen3", 32, 8), Model("qwen3", 64, 8)
MOE_30B, MOE_235B = Model("qwen3_moe", 32, 4, 128), Model("qwen3_moe", 64, 4, 128)
QWEN35_9B, QWEN35_27B = Model("qwen3_5_text", 16, 4), Model("qwen3_5_text", 24, 4)
QWEN35_35B = Model("qwen3_5_moe_text", 16, 2, 256)
KIMI = Model("kimi_k2", 64, 64, 384)
SCRIPTS = {
    "4B": Script(SMALL, 1, 8, 2),
    "4B, FP8": Script(SMALL, 1, 8, 2),
    "4B, several tasks": Script(SMALL, 1, 8, 2),
    "4B, tools": Script(SMALL, 1, 4, 2),
    "8B, agents": Script(MIDDLE, 1, 8, 2),
    "9B, GLM-Z1": Script(Model("glm4", 32, 2), 1, 4, 2, apart=4),
    "9B, Qwen3.5, asynchronous": Script(QWEN35_9B, 1, 4, 2, apart=4),
    "27B, Qwen3.5": Script(QWEN35_27B, 4, 8, 2),
    "32B": Script(LARGE, 1, 8, 8),
    "30B-A3B, FP8": Script(MOE_30B, 2, 8, 8, ep_size=8),
    "35B-A3B, Qwen3.5": Script(QWEN35_35B, 1, 8, 8, ep_size=8),
    "35B-A3B, Qwen3.6, agents": Script(QWEN35_35B, 8, 8, 8, ep_size=8, dp_size=8, whole_dense_mlp=True),
    "235B-A22B": Script(MOE_235B, 8, 8, 32, apart=64, ep_size=32, dp_size=4),
    "235B-A22B, INT4": Script(MOE_235B, 8, 8, 8, ep_size=8),
    "235B-A22B, fine-tuning": Script(MOE_235B, 4, 8, 0),
    "355B-A32B, GLM-4.7": Script(Model("glm4_moe", 96, 8, 160), 8, 8, 32, ep_size=32, dp_size=4, whole_dense_mlp=True),
    "744B-A40B, GLM-5": Script(
        Model("glm_moe_dsa", 64, 64, 256), 32, 8, 64, ep_size=64, dp_size=64, whole_dense_mlp=True
    ),
    "Kimi-K2": Script(KIMI, 32, 8, 16, ep_size=16, dp_size=8, whole_dense_mlp=True),
    "Kimi-K2, thinking, INT4": Script(KIMI, 32, 8, 8, ep_size=8),
    "MiniMax-M2": Script(Model("minimax_m2", 48, 8, 256), 16, 8, 16, ep_size=16),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_engines_of_a_published_script_pass_the_rules_and_have_places(
    name: str, base: list[str], tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    model, num_gpus = script.model, script.apart or script.nodes * script.per_node
    checkpoint = tmp_path / "published"
    checkpoint.mkdir()
    shape = {"num_experts": model.experts, "n_routed_experts": model.experts, "tie_word_embeddings": model.tied}
    (checkpoint / "config.json").write_text(json.dumps({"model_type": model.model_type, **shape}))
    args = parse_args([*base, "--device", "cuda"]).replace(
        hf_checkpoint=str(checkpoint),
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        rollout_num_gpus=num_gpus,
        rollout_num_gpus_per_engine=script.width or 1,
        debug_train_only=not script.width,
        debug_rollout_only=model.model_type not in FAMILIES,  # then nobody has to know its tensors
        sglang=Passthrough("sglang", script.sglang),
    )
    assert [problem for rule in RULES if (problem := rule(args)) is not None] == []
    count = script.nodes + -(-script.apart // script.per_node)
    hosts = [Host(f"h{i}", f"10.0.0.{i}", script.per_node, 8) for i in range(count)]
    engines = [EngineDemand(script.width)] * (num_gpus // script.width) if script.width else []
    plan = plan_placement(
        num_nodes=script.nodes, num_per_node=script.per_node, engines=engines, colocate=not script.apart, hosts=hosts
    )
    assert len(plan.engines) == len(engines) and all(len(e.slots) == script.width for e in plan.engines)
