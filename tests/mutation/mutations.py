"""Bugs that RL frameworks have had, each as one replacement in our code. A record is found by its name.

`before` must stand in its file exactly once, so a mutation that no longer fits the code fails loudly. `suite` names the
tests that have to notice it (`SUITES`).
"""

from __future__ import annotations

from tests.mutation.engine_mutations import ENGINE_WIRING
from tests.mutation.loop_mutations import ROLLOUT, STEPS, WIRING
from tests.mutation.record import Mutation
from tests.mutation.rollout_mutations import ROLLOUT_WIRING

ALGORITHMS: dict[str, Mutation] = {
    "groups by position": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "    scored = scored[np.argsort(",
        "    groups = np.arange(len(rewards)) // (len(rewards) // len(np.unique(groups)))\n"
        "    scored = scored[np.argsort(",
    ),
    "std of the population": Mutation(
        "algorithms", "algorithms/advantages/grpo.py", "np.std(own, ddof=1)", "np.std(own)"
    ),
    "siblings counted twice": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "_, which = np.unique(executions[members], return_inverse=True)",
        "which = np.arange(len(members))",
    ),
    "unscored is a reward of zero": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "    scored = np.flatnonzero(~np.isnan(rewards))",
        "    rewards = np.nan_to_num(rewards)\n    scored = np.flatnonzero(~np.isnan(rewards))",
    ),
    "rounding of equal rewards is a signal": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "return len(own) < 2 or bool(np.ptp(own) <= EQUAL_TOLERANCE * np.abs(own).max())",
        "return len(own) < 2",
    ),
    "leave-one-out leaves none out": Mutation(
        "algorithms", "algorithms/advantages/grpo.py", "(own.sum() - own[which]) / (len(own) - 1)", "own.mean()"
    ),
    "masked tokens in whitening": Mutation(
        "algorithms",
        "algorithms/advantages/returns.py",
        "trained = trained if nums[p] == len(masks[p]) else trained[np.asarray(masks[p]) > 0]",
        "trained = trained",
    ),
    "one-pass variance": Mutation(
        "algorithms",
        "algorithms/advantages/returns.py",
        "    whole = math.fsum(float(part @ part) for part in parts)\n    if whole - total * mean >= whole / 64:\n"
        "        return whole - total * mean\n"
        "    return math.fsum(float(np.square(part - mean).sum()) for part in parts)",
        "    every = values.astype(np.float32)\n"
        "    return float(np.square(every).mean() - np.float32(mean) ** 2) * len(values)",
    ),
    "GAE through masked tokens": Mutation(
        "algorithms",
        "algorithms/advantages/ppo.py",
        "        steps = trained\n",
        "        steps = np.ones_like(trained)\n",
    ),
    "GAE bootstraps the last token": Mutation(
        "algorithms",
        "algorithms/advantages/ppo.py",
        "np.multiply(value[1:], gamma * (1 - lambd), out=x[:-1])",
        "np.multiply(np.append(value[1:], value[-1:]), gamma * (1 - lambd), out=x)",
    ),
    "returns discounted through observations": Mutation(
        "algorithms",
        "algorithms/advantages/reinforce.py",
        "        out[trained] = reverse_scan(rewards[trained], gamma)",
        "        out = np.where(trained, reverse_scan(rewards, gamma), 0.0)",
    ),
    "score at the last token, trained or not": Mutation(
        "algorithms",
        "algorithms/advantages/returns.py",
        "out[last] += rewards",
        "out[-1] += rewards",
    ),
    "rewards at observations are lost": Mutation(
        "algorithms", "algorithms/advantages/returns.py", "out + credited_rewards(own, mask)", "out + own"
    ),
    "all turns are compared with each other": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "np.stack([batch.groups[samples], numbers])",
        "batch.groups[None, samples]",
    ),
    "totals without rewards of tokens": Mutation(
        "algorithms",
        "algorithms/advantages/__init__.py",
        "if self.token_rewards is None or self.rewards_are_final:",
        "if True:",
    ),
    "KL in the reward is a bonus": Mutation(
        "algorithms", "algorithms/advantages/returns.py", "float(advantage) - kl_coef *", "float(advantage) + kl_coef *"
    ),
    "distillation away from the teacher": Mutation(
        "algorithms", "algorithms/advantages/returns.py", "- coef * excess", "+ coef * excess"
    ),
    "siblings with a mean each": Mutation(
        "algorithms",
        "algorithms/aggregation/__init__.py",
        "per_execution[execution] = per_execution.get(execution, 0.0) + total",
        "per_execution[execution] = total",
    ),
    "masked executions leave the denominator": Mutation(
        "algorithms", "algorithms/aggregation/__init__.py", "sum(count_masked or total > 0 for", "sum(total > 0 for"
    ),
    "token mean over padding": Mutation(
        "algorithms",
        "algorithms/aggregation/__init__.py",
        "divisors = self.divisors(trained_tokens(mask_S), execution_S, count_masked=count_masked)",
        "divisors = self.divisors([float(len(m)) for m in mask_S], execution_S, count_masked=count_masked)",
    ),
    "KL in the other direction": Mutation(
        "algorithms",
        "algorithms/kl/__init__.py",
        "d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)",
        "d, _ = clamped_log_ratio(ref_log_probs.detach(), log_probs, mask, log_ratio_limit)",
    ),
    "KL sign": Mutation("algorithms", "algorithms/kl/__init__.py", "        return d\n", "        return -d\n"),
    "unbiased KL without gradient of the ratio": Mutation(
        "algorithms",
        "algorithms/kl/__init__.py",
        "self.of_log_ratio(d) * log_ratio.exp()",
        "self.of_log_ratio(d) * log_ratio.exp().detach()",
    ),
    "clip bounds swapped": Mutation(
        "algorithms",
        "algorithms/policy_loss/ppo_clip.py",
        "ratio.clamp(1.0 - eps_clip, 1.0 + high)",
        "ratio.clamp(1.0 - high, 1.0 + eps_clip)",
    ),
    "optimistic clip": Mutation(
        "algorithms",
        "algorithms/policy_loss/ppo_clip.py",
        "loss = torch.maximum(plain, bounded)",
        "loss = torch.minimum(plain, bounded)",
    ),
    "dual clip of positive advantages": Mutation(
        "algorithms", "algorithms/policy_loss/ppo_clip.py", "(advantages < 0) & (loss > ceiling)", "loss > ceiling"
    ),
    "GSPO sums instead of mean": Mutation(
        "algorithms", "algorithms/policy_loss/ppo_clip.py", "sequences.mean(own, mask)", "sequences.sum(own)"
    ),
    "GSPO gives tokens the mean of their sequence": Mutation(
        "algorithms",
        "algorithms/policy_loss/ppo_clip.py",
        "(sequences.spread(sequences.mean(own, mask)) + (log_ratio - own)).exp()",
        "sequences.spread(sequences.mean(log_ratio, mask)).exp()",
    ),
    "rounding is a clip of the value": Mutation(
        "algorithms", "algorithms/token_losses.py", " & ((value - old).abs() > value_clip)", ""
    ),
    "low variance times any ratio": Mutation(
        "algorithms",
        "algorithms/kl/__init__.py",
        "return values.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)",
        "return values",
    ),
    "a bound of one factor": Mutation(
        "algorithms",
        "algorithms/kl/__init__.py",
        "product = self.bounded(self.of_log_ratio(d) * log_ratio.exp())",
        "product = self.bounded(self.of_log_ratio(d)) * log_ratio.exp()",
    ),
    "a log-ratio at its limit leaves the other its slope": Mutation(
        "algorithms",
        "algorithms/kl/__init__.py",
        "torch.where(limited | ratio_limited, product.detach(), product)",
        "product",
    ),
    "sequence mean over masked tokens": Mutation(
        "algorithms",
        "algorithms/token_losses.py",
        "num = self.sum((mask > 0).to(values.dtype))",
        "num = self.sum(values.new_ones(values.shape))",
    ),
    "CISPO without stop-gradient": Mutation(
        "algorithms",
        "algorithms/policy_loss/cispo.py",
        "clamped_log_ratio(log_probs.detach(), old_log_probs",
        "clamped_log_ratio(log_probs, old_log_probs",
    ),
    "CISPO cuts gradients": Mutation(
        "algorithms",
        "algorithms/policy_loss/cispo.py",
        "    clipped = (weight != ratio) & (mask > 0)",
        "    clipped = (weight != ratio) & (mask > 0)\n    loss = loss * ~clipped",
    ),
    "SAPO temperatures swapped": Mutation(
        "algorithms",
        "algorithms/policy_loss/sapo.py",
        "torch.full_like(advantage, tau_positive), torch.full_like(advantage, tau_negative)",
        "torch.full_like(advantage, tau_negative), torch.full_like(advantage, tau_positive)",
    ),
    "DPPO drops updates that return": Mutation(
        "algorithms", "algorithms/policy_loss/dppo.py", "dropped = far & moves_away", "dropped = far"
    ),
    "DPPO with the KL of the other direction": Mutation(
        "algorithms",
        "algorithms/policy_loss/dppo.py",
        "log_p, log_q = old.double().clamp(max=-NEARLY_CERTAIN), new.double().clamp(max=-NEARLY_CERTAIN)",
        "log_p, log_q = new.double().clamp(max=-NEARLY_CERTAIN), old.double().clamp(max=-NEARLY_CERTAIN)",
    ),
    "MaxRL with the mean of samples": Mutation(
        "algorithms",
        "algorithms/advantages/grpo.py",
        "(rewards[members] - np.mean(own)) / np.mean(own)",
        "(rewards[members] - np.mean(own)) / np.mean(rewards[members])",
    ),
    "importance weight with a gradient": Mutation(
        "algorithms",
        "algorithms/off_policy/tis.py",
        "clamped_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(),",
        "clamped_log_ratio(old_log_probs, rollout_log_probs.detach(),",
    ),
    "importance ratio upside down": Mutation(
        "algorithms",
        "algorithms/off_policy/tis.py",
        "clamped_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(),",
        "clamped_log_ratio(rollout_log_probs.detach(), old_log_probs.detach(),",
    ),
    "masking that truncates": Mutation(
        "algorithms",
        "algorithms/off_policy/tis.py",
        "weight = torch.where(outside, torch.zeros_like(raw), raw)",
        "weight = torch.where(outside, raw.clamp(low, high), raw)",
    ),
    "OPSM drops what came near": Mutation(
        "algorithms",
        "algorithms/off_policy/masks.py",
        "sequences.mean(-log_ratio, mask)",
        "sequences.mean(log_ratio, mask)",
    ),
    "OPSM drops good answers": Mutation(
        "algorithms",
        "algorithms/off_policy/masks.py",
        "(far & (unmasked(advantages, mask) < 0))",
        "far",
    ),
    "the mask multiplies": Mutation(
        "algorithms",
        "algorithms/token_losses.py",
        "return torch.where(mask > 0, values, torch.zeros_like(values))",
        "return values * (mask > 0)",
    ),
    "no clamp of log-ratios": Mutation(
        "algorithms",
        "algorithms/token_losses.py",
        "return raw.clamp(-limit, limit), raw.abs() > limit",
        "return raw, raw.abs() > limit",
    ),
    "optimistic value clip": Mutation(
        "algorithms",
        "algorithms/token_losses.py",
        "torch.maximum(plain, bounded)",
        "torch.minimum(plain, bounded)",
    ),
}

DATA: dict[str, Mutation] = {
    "response mask off by one": Mutation(
        "data",
        "data/packing.py",
        "r[len(r) - s.response_length - 1 : -1]",
        "r[len(r) - s.response_length :]",
    ),
    "targets not shifted": Mutation(
        "data",
        "data/packing.py",
        "s.tokens[s.num_tokens - s.response_length :]",
        "s.tokens[s.num_tokens - s.response_length - 1 : -1]",
    ),
    "positions run on across sequences": Mutation(
        "data",
        "data/packing.py",
        "np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)])",
        "np.arange(num_tokens, dtype=np.int64)",
    ),
    "positions begin anew behind a shared prefix": Mutation(
        "shared prefixes",
        "data/packing.py",
        "starts = [*firsts, 0]",
        "starts = [0] * len(lengths)",
    ),
    "positions are one less behind a shared prefix": Mutation(
        "shared prefixes",
        "training/model/row_shards.py",
        "np.repeat(starts - before, lengths)",
        "np.repeat(starts - np.maximum(before - 1, 0), lengths)",
    ),
    "a branch sees its siblings": Mutation(
        "shared prefixes",
        "data/packing.py",
        "rows[:n] for rows, n in zip(self.token_rows, self.num_shared, strict=True)",
        "np.arange(rows[0], rows[n]) if n else _NONE for rows, n in zip(self.token_rows, self.num_shared, strict=True)",
    ),
    "context-parallel ranks do not see shared prefixes": Mutation(
        "shared prefixes",
        "data/context_split.py",
        "keys += [place[prefix], place[start : start + seen]]",
        "keys += [place[start : start + len(prefix)], place[start : start + seen]]",
    ),
    "tokens of other experts are shared": Mutation(
        "shared prefixes",
        "data/shared_prefixes.py",
        "common = self._alike(position, other, common)",
        "pass",
    ),
}

_STEP_WEIGHTS = """        own = step_weights(batch, step.positions, algorithm.aggregation, count_masked=count_masked)
        for position, part in own.weights.items():
            weights[position], shares[position], units[position] = part, own.token_share, own.unit
"""


def _weights_by_part(parts: str) -> str:
    """The same with the denominators of each of `parts`, and the mean over parts."""
    body = "".join(f"    {line}\n" for line in _STEP_WEIGHTS.splitlines())
    body = body.replace("step.positions", "part_positions").replace(
        "= part, own", "= TokenWeights(part.mask, part.divisor * len(split)), own"
    )
    scored = "any(samples[p].is_scored for p in part)"
    return f"        split = [part for part in {parts} if {scored}]\n        for part_positions in split:\n{body}"


TRAINING: dict[str, Mutation] = {
    "mean of means over micro-batches": Mutation(
        "training",
        "training/step/micro_batch.py",
        _STEP_WEIGHTS,
        _weights_by_part("[mb for rank in step.micro_batches for mb in rank]"),
    ),
    "denominators of each rank": Mutation(
        "training",
        "training/step/micro_batch.py",
        _STEP_WEIGHTS,
        _weights_by_part("[[p for mb in rank for p in mb] for rank in step.micro_batches]"),
    ),
    "an execution is its index": Mutation(
        "training", "core/batch.py", "numbers.setdefault((s.group_index, s.index)", "numbers.setdefault((0, s.index)"
    ),
    "masked executions in a reducer's denominator": Mutation(
        "training",
        "algorithms/whole_batch.py",
        "counted = num_counted(tokens_per_execution(totals, executions), count_masked)",
        "counted = len(set(executions))",
    ),
    "unscored samples in the denominator": Mutation(
        "training",
        "algorithms/whole_batch.py",
        "members = [p for p in positions if samples[p].is_scored]",
        "members = list(positions)",
    ),
    "advantages of other samples": Mutation(
        "training",
        "training/step/micro_batch.py",
        "_join([arrays[p] for p in positions], np.float32)",
        "_join([next(a for q, a in enumerate(arrays) if len(a) == len(arrays[p])) for p in positions], np.float32)",
    ),
    "a micro-batch is one sequence": Mutation(
        "training",
        "training/step/micro_batch.py",
        "np.repeat(np.arange(len(samples)), [",
        "np.repeat(np.zeros(len(samples), np.int64), [",
    ),
    "log-probs of the token after": Mutation(
        "training",
        "training/step/micro_batch.py",
        "ASKED: asked_positions",
        "ASKED: np.minimum(asked_positions + 1, len(row.tokens) - 1)",
    ),
    "ratio to the engine's log-probs": Mutation(
        "training",
        "training/step/loss.py",
        "old = batch.rollout_log_probs if args.use_rollout_logprobs else recomputed",
        "old = batch.rollout_log_probs",
    ),
    "entropy is punished": Mutation(
        "training",
        "training/step/loss.py",
        "extra = extra - args.entropy_coef",
        "extra = extra + args.entropy_coef",
    ),
    "KL loss pushes away": Mutation(
        "training", "training/step/loss.py", "extra = extra + args.kl_loss_coef", "extra = extra - args.kl_loss_coef"
    ),
    "importance weight of the current policy": Mutation(
        "training",
        "training/step/loss.py",
        "log_probs.detach(), old, whole)",
        "log_probs.detach(), old, log_probs.detach())",
    ),
    "teacher term not whitened": Mutation(
        "training",
        "algorithms/whole_batch.py",
        "    if args.normalize_advantages:\n",
        "    if args.normalize_advantages and not args.use_opd:\n",
    ),
}

LOG_PROBS: dict[str, Mutation] = {
    "temperature forgotten": Mutation(
        "log_probs", "training/model/log_probs.py", "shard, temperature, with_entropy", "shard, 1.0, with_entropy"
    ),
    "temperature forgotten in the gradient": Mutation(
        "log_probs",
        "training/model/log_probs.py",
        "own = torch.where(held, grad_log_probs * scale, 0.0)",
        "own = torch.where(held, grad_log_probs, 0.0)",
    ),
    "padded vocabulary in the softmax": Mutation(
        "log_probs",
        "training/model/log_probs.py",
        "weight.size(0), weight, weight[: settings.shard.num_valid]",
        "weight.size(0), weight, weight",
    ),
    "entropy of logits": Mutation(
        "log_probs",
        "training/model/log_probs.py",
        "entropy = log_total - weighted / total",
        "entropy = log_total + weighted / total",
    ),
}

MUTATIONS: dict[str, Mutation] = {
    **ALGORITHMS,
    **DATA,
    **TRAINING,
    **LOG_PROBS,
    **STEPS,
    **WIRING,
    **ROLLOUT,
    **ROLLOUT_WIRING,
    **ENGINE_WIRING,
}
