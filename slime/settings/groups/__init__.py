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
    Group(cluster.ClusterSettings, "placement", "Cluster and placement", cluster.RULES),
    Group(rollout.RolloutSettings, "rollout", "Rollout", rollout.RULES, rollout.PASSED),
    Group(rollout.ScheduleSettings, "async", "Schedule and staleness"),
    Group(data.DataSettings, "data", "Data", data.RULES, data.PASSED),
    Group(data.ImageSettings, "data", "Images", data.IMAGE_RULES, data.IMAGE_PASSED),
    Group(evaluation.EvalSettings, "eval", "Evaluation", evaluation.RULES),
    Group(reward.RewardSettings, "reward", "Reward", reward.RULES),
    Group(reward.AgentSettings, "agent", "Agents", reward.AGENT_RULES),
    Group(algorithm.AlgorithmSettings, "algorithm", "Algorithm", algorithm.RULES),
    Group(algorithm.OffPolicySettings, "off-policy", "Off-policy corrections", algorithm.OFF_POLICY_RULES),
    Group(
        algorithm.RoutingSettings, "routing", "Routing of experts", algorithm.ROUTING_RULES, algorithm.ROUTING_PASSED
    ),
    Group(algorithm.TeacherSettings, "distillation", "On-policy distillation", algorithm.TEACHER_RULES),
    Group(algorithm.CriticSettings, "critic", "Critic"),
    Group(
        training.ParameterSettings, "parameters", "Trained parameters, reference, old policy", training.PARAMETER_RULES
    ),
    Group(training.TrainingSettings, "batch", "Training batches", training.RULES, training.PASSED),
    Group(training.CheckpointSettings, "checkpoint", "Checkpoint", training.CHECKPOINT_RULES),
    Group(weights.WeightSyncSettings, "weight-sync", "Weight sync", weights.RULES),
    Group(weights.QuantisedSettings, "quantised", "Quantised engines", weights.QUANTISED_RULES),
    Group(
        engines.ServingSettings,
        "serving",
        "Serving",
        (*engines.ENGINE_RULES, *engines.PREFIX_CACHE_RULES, *engines.RULES),
    ),
    Group(
        engines.SpeculationSettings,
        "mtp",
        "Multi-token prediction and speculative decoding",
        engines.SPECULATION_RULES,
        engines.SPECULATION_PASSED,
    ),
    Group(
        engines.TopologySettings,
        "topology",
        "Topology",
        (*engines.TOPOLOGY_RULES, *engines.PAIR_RULES),
        engines.TOPOLOGY_PASSED,
    ),
    Group(cluster.FleetSettings, "fleet", "Fleet", cluster.FLEET_RULES),
    Group(logging.LoggingSettings, "observability", "Logging"),
    Group(logging.DebugSettings, "debug", "Debug", logging.RULES),
    Group(logging.ProfilingSettings, "profiling", "Profiling", logging.PROFILING_RULES),
    Group(hooks.HookSettings, "hooks", "Hooks", hooks.RULES),
    Group(
        launch_scripts.LaunchScriptSettings,
        "launch-scripts",
        "Launch scripts",
        launch_scripts.RULES,
        launch_scripts.PASSED,
    ),
    Group(logging.ConfigurationSettings, "configuration", "Configuration"),
)
"""All groups, in the order of --help."""
