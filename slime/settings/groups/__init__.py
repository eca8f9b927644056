"""Slime's own settings, one file per group; `HEADINGS` gives their order and titles in --help."""

from __future__ import annotations

from slime.settings.groups.algorithm import AlgorithmArgs
from slime.settings.groups.checkpoint import CheckpointArgs
from slime.settings.groups.cluster import ClusterArgs
from slime.settings.groups.critic import CriticArgs
from slime.settings.groups.data import DataArgs
from slime.settings.groups.debug import DebugArgs
from slime.settings.groups.evaluation import EvalArgs
from slime.settings.groups.hooks import HookArgs
from slime.settings.groups.logging import LoggingArgs
from slime.settings.groups.off_policy import OffPolicyArgs
from slime.settings.groups.parameters import ParameterArgs
from slime.settings.groups.reward import RewardArgs
from slime.settings.groups.rollout import RolloutArgs
from slime.settings.groups.serving import ServingArgs
from slime.settings.groups.teacher import TeacherArgs
from slime.settings.groups.training import TrainingArgs
from slime.settings.groups.weights import WeightSyncArgs

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
