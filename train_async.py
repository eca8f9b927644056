"""Asynchronous training: the calls of `train.py` in a different order, while engines keep generating.

The default is one step off: step k+1 is generated while step k is trained. Weights change only between two generations,
so every sample has one weight version, exactly one behind the trainer (more with a larger `--update-weights-interval`).
With `--fully-async`, a worker generates continuously, even during a weight sync. A step trains on the oldest finished
groups that are within `--max-weight-staleness`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.cluster.restarting import restarting
from slime.settings import Args, run_or_exit

if TYPE_CHECKING:
    from slime.cluster.training_run import Run


@restarting
def train_async(args: Args) -> None:
    """Starts the run; `one_step_off` or `fully_async` runs its steps."""
    from slime.cluster.launch_run import launch

    with launch(args) as run:
        start = run.restore()
        run.sync_weights()
        if run.evaluates_before(start):
            run.evaluate(start - 1)
        steps = fully_async if args.fully_async else one_step_off
        steps(run, range(start, args.num_rollout))


def one_step_off(run: Run, rollout_ids: range) -> None:
    """Starts the next generation before each training step, and waits for it before weights change."""
    following = run.start_generation(rollout_ids.start) if rollout_ids else None
    for rollout_id in rollout_ids:
        assert following is not None, f"nothing generates the samples of step {rollout_id}"
        batch = run.finish_generation(following)
        following = run.start_generation(rollout_id + 1) if rollout_id + 1 in rollout_ids else None
        run.train(rollout_id, batch)
        if run.saves_after(rollout_id):
            run.save(rollout_id)
        if run.syncs_after(rollout_id):
            if following is not None:
                run.wait_for_generation(following)
            run.sync_weights()
            run.check_log_probs()
        if run.evaluates_after(rollout_id):
            run.evaluate(rollout_id)
        run.end_step(rollout_id)


def fully_async(run: Run, rollout_ids: range) -> None:
    """Generates continuously. A step takes finished groups, and a save keeps the tokens of unfinished groups."""
    for rollout_id in rollout_ids:
        batch = run.generate(rollout_id)
        run.train(rollout_id, batch)
        saves, syncs = run.saves_after(rollout_id), run.syncs_after(rollout_id)
        if syncs:
            run.sync_weights(for_save=saves)
        if saves:
            run.save(rollout_id)  # after the weight sync, which aborted the running requests, so their tokens are saved
        if syncs and (saves or rollout_id == rollout_ids.start):
            run.check_log_probs()  # not in every step, because the check samples and delays the worker
        if run.evaluates_after(rollout_id):
            run.evaluate(rollout_id)
        run.end_step(rollout_id)


if __name__ == "__main__":
    run_or_exit(train_async, synchronous=False)
