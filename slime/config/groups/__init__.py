"""Slime's own settings, one file per group; `HEADINGS` gives their order and titles in --help."""

from __future__ import annotations

from slime.config.groups.algorithm import AlgorithmArgs
from slime.config.groups.checkpoint import CheckpointArgs
from slime.config.groups.cluster import ClusterArgs
from slime.config.groups.critic import CriticArgs
from slime.config.groups.data import DataArgs
from slime.config.groups.debug import DebugArgs
from slime.config.groups.evaluation import EvalArgs
from slime.config.groups.hooks import HookArgs
from slime.config.groups.logging import LoggingArgs
from slime.config.groups.off_policy import OffPolicyArgs
from slime.config.groups.parameters import ParameterArgs
from slime.config.groups.reward import RewardArgs
from slime.config.groups.rollout import RolloutArgs
from slime.config.groups.serving import ServingArgs
from slime.config.groups.teacher import TeacherArgs
from slime.config.groups.training import TrainingArgs
from slime.config.groups.weights import WeightSyncArgs

__all__ = [
    "HEADINGS",
    "AlgorithmArgs",
    "CheckpointArgs",
    "ClusterArgs",
    "CriticArgs",
    "DataArgs",
    "DebugArgs",
    "EvalArgs",
    "HookArgs",
    "LoggingArgs",
    "OffPolicyArgs",
    "ParameterArgs",
    "RewardArgs",
    "RolloutArgs",
    "ServingArgs",
    "TeacherArgs",
    "TrainingArgs",
    "WeightSyncArgs",
]

HEADINGS: dict[type, str] = {
    ClusterArgs: "Cluster and placement",
    RolloutArgs: "Rollout",
    DataArgs: "Data",
    EvalArgs: "Evaluation",
    RewardArgs: "Reward",
    AlgorithmArgs: "Algorithm",
    OffPolicyArgs: "Off-policy corrections",
    TeacherArgs: "On-policy distillation",
    CriticArgs: "Critic",
    ParameterArgs: "Parameters and copies",
    TrainingArgs: "Training batches",
    CheckpointArgs: "Checkpoint",
    WeightSyncArgs: "Weight sync",
    ServingArgs: "Serving",
    LoggingArgs: "Logging",
    DebugArgs: "Debug",
    HookArgs: "Hooks",
}
