"""slime's own settings, in groups. A new group is a dataclass, an entry of `GROUPS`, and a base class of `Args`."""

from __future__ import annotations

from slime.settings.fields import Group
from slime.settings.groups import (
    algorithm,
    cluster,
    data,
    engines,
    evaluation,
    hooks,
    launch_scripts,
    logging,
    reward,
    rollout,
    training,
    weights,
)

GROUPS: tuple[Group, ...] = (
    Group(cluster.ClusterSettings, "Cluster and placement", cluster.RULES),
    Group(rollout.RolloutSettings, "Rollout", rollout.RULES, rollout.PASSED),
    Group(data.DataSettings, "Data", data.RULES, data.PASSED),
    Group(data.ImageSettings, "Images", data.IMAGE_RULES, data.IMAGE_PASSED),
    Group(evaluation.EvalSettings, "Evaluation", evaluation.RULES),
    Group(reward.RewardSettings, "Reward", reward.RULES),
    Group(reward.AgentSettings, "Agents", reward.AGENT_RULES),
    Group(algorithm.AlgorithmSettings, "Algorithm", algorithm.RULES),
    Group(algorithm.OffPolicySettings, "Off-policy corrections", algorithm.OFF_POLICY_RULES),
    Group(algorithm.RoutingSettings, "Routing of experts", algorithm.ROUTING_RULES, algorithm.ROUTING_PASSED),
    Group(algorithm.TeacherSettings, "On-policy distillation", algorithm.TEACHER_RULES),
    Group(algorithm.CriticSettings, "Critic"),
    Group(training.ParameterSettings, "Trained parameters, reference, old policy", training.PARAMETER_RULES),
    Group(training.TrainingSettings, "Training batches", training.RULES, training.PASSED),
    Group(training.CheckpointSettings, "Checkpoint", training.CHECKPOINT_RULES),
    Group(weights.WeightSyncSettings, "Weight sync", weights.RULES),
    Group(weights.QuantisedSettings, "Quantised engines", weights.QUANTISED_RULES),
    Group(engines.ServingSettings, "Serving", (*engines.ENGINE_RULES, *engines.PREFIX_CACHE_RULES, *engines.RULES)),
    Group(
        engines.SpeculationSettings,
        "Multi-token prediction and speculative decoding",
        engines.SPECULATION_RULES,
        engines.SPECULATION_PASSED,
    ),
    Group(
        engines.TopologySettings, "Topology", (*engines.TOPOLOGY_RULES, *engines.PAIR_RULES), engines.TOPOLOGY_PASSED
    ),
    Group(cluster.FleetSettings, "Fleet", cluster.FLEET_RULES),
    Group(logging.LoggingSettings, "Logging"),
    Group(logging.DebugSettings, "Debug", logging.RULES),
    Group(logging.ProfilingSettings, "Profiling", logging.PROFILING_RULES),
    Group(hooks.HookSettings, "Hooks", hooks.RULES),
    Group(launch_scripts.LaunchScriptSettings, "Launch scripts", launch_scripts.RULES),
    Group(logging.ConfigurationSettings, "Configuration"),
)
"""All groups, in the order of --help."""
