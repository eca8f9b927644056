"""What a mutation is, and which tests have to notice it."""

from __future__ import annotations

from dataclasses import dataclass

SUITES: dict[str, tuple[str, ...]] = {
    "algorithms": ("tests/unit/algorithms/test_*.py",),
    "data": ("tests/unit/data/test_packing.py", "tests/unit/data/test_schedule.py"),
    "shared prefixes": ("tests/unit/data/test_shared_prefixes.py",),
    "training": ("tests/unit/training/test_step_reference.py",),
    "log_probs": ("tests/unit/training/test_log_probs*.py",),
    "steps": ("tests/contract/training/test_steps_against_torch.py",),
    "adapters": ("tests/contract/training/test_lora.py",),
    "critic": ("tests/contract/training/test_critic_steps.py",),
    "buffer": ("tests/unit/buffer/test_data_buffer.py",),
    "evaluation": ("tests/unit/rollout/test_evaluation_apart.py",),
    "saved groups": ("tests/unit/buffer/test_saved_groups.py",),
    "sampling": ("tests/unit/rollout/test_convert_and_evaluate.py",),
    "tries": ("tests/unit/rollout/test_step_loop.py",),
    "worker": ("tests/unit/rollout/test_fully_async.py",),
    "workers": ("tests/unit/rollout/test_episode_workers.py",),
    "plugins": ("tests/unit/rollout/test_public_names.py",),
    "teacher": ("tests/unit/rollout/test_workflows.py",),
    "graders": ("tests/unit/rewards/test_grader_pool.py",),
    "programs": ("tests/unit/rewards/test_code_grader.py",),
    "supervisor": ("tests/unit/fleet/test_supervisor.py",),
    "engines": ("tests/unit/cluster/test_engine_tracker.py",),
    "wiring": ("tests/unit/cluster/test_wiring.py",),
    "protocol": ("tests/unit/weights/test_sync_protocol.py", "tests/unit/weights/test_transports.py"),
    "control": ("tests/unit/serving/test_control.py",),
    "server": ("tests/unit/serving/test_server_spec.py",),
    "sequence": ("tests/unit/cluster/test_weight_sync_sequence.py",),
}
"""The fast tests of each room, as patterns: on formula level where there is one, else with a real tiny trainer."""
LEFT_OUT = ("test_against_trl.py", "test_toy_convergence.py")
"""Not run against mutations: they take longer than all the rest."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug."""

    suite: str
    file: str
    """Below slime/."""
    before: str
    after: str
