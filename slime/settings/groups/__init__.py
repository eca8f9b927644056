"""Slime's own settings, one file per group. A new group is a file, a line below, and a base of `Args`."""

from __future__ import annotations

from slime.settings.group import Group
from slime.settings.groups import (
    agent,
    algorithm,
    algorithm_rules,
    checkpoint,
    cluster,
    configuration,
    critic,
    data,
    debug,
    engine_rules,
    evaluation,
    fleet,
    hooks,
    logging,
    off_policy,
    pair_rules,
    parameters,
    reward,
    rollout,
    routing,
    serving,
    teacher,
    topology,
    training,
    training_rules,
    weights,
)

GROUPS: tuple[Group, ...] = (
    Group(cluster.ClusterSettings, "Cluster and placement", cluster.RULES),
    Group(rollout.RolloutSettings, "Rollout", rollout.RULES, rollout.PASSED),
    Group(data.DataSettings, "Data", data.RULES, data.PASSED),
    Group(evaluation.EvalSettings, "Evaluation", evaluation.RULES),
    Group(reward.RewardSettings, "Reward", reward.RULES),
    Group(agent.AgentSettings, "Agents", agent.RULES),
    Group(algorithm.AlgorithmSettings, "Algorithm", algorithm_rules.RULES),
    Group(off_policy.OffPolicySettings, "Off-policy corrections", off_policy.RULES),
    Group(routing.RoutingSettings, "Routing of experts", routing.RULES, routing.PASSED),
    Group(teacher.TeacherSettings, "On-policy distillation", teacher.RULES),
    Group(critic.CriticSettings, "Critic"),
    Group(parameters.ParameterSettings, "Trained parameters, reference, old policy", parameters.RULES),
    Group(training.TrainingSettings, "Training batches", training_rules.RULES, training.PASSED),
    Group(checkpoint.CheckpointSettings, "Checkpoint", checkpoint.RULES),
    Group(weights.WeightSyncSettings, "Weight sync"),
    Group(serving.ServingSettings, "Serving", (*engine_rules.RULES, *serving.RULES)),
    Group(topology.TopologySettings, "Topology", (*topology.RULES, *pair_rules.RULES), topology.PASSED),
    Group(fleet.FleetSettings, "Fleet", fleet.RULES),
    Group(logging.LoggingSettings, "Logging"),
    Group(debug.DebugSettings, "Debug", debug.RULES),
    Group(hooks.HookSettings, "Hooks"),
    Group(configuration.ConfigurationSettings, "Configuration"),
)
"""In the order of --help."""
