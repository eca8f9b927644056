"""Asynchronous training: the same verbs as `train.py` in another order.

One step off, the default: step k+1 is generated while step k is trained. Weights change only between two generations,
so every sample has one weight version, exactly one behind the trainer (`--update-weights-interval` more when it is
larger than one). With `--fully-async` a worker generates all the time, also while weights are published, and a step
trains the oldest groups that are finished and not older than `--max-weight-staleness`.
"""

from __future__ import annotations

from slime.settings import Args, run_or_exit


def train_async(args: Args) -> None:
    """The algorithm."""
    from slime.cluster.launch import launch

    with launch(args) as run:
        start = run.restore()
        run.sync_weights()
        if run.evaluates_before(start):
            run.evaluate(start - 1)
        following = run.start_generation(start) if start < args.num_rollout else None
        for rollout_id in range(start, args.num_rollout):
            following = following or run.start_generation(rollout_id)
            batch = run.finish_generation(following)
            ahead = rollout_id + 1 < args.num_rollout and not args.fully_async
            following = run.start_generation(rollout_id + 1) if ahead else None
            run.train(rollout_id, batch)
            publishes = (rollout_id + 1) % args.update_weights_interval == 0 or rollout_id + 1 == args.num_rollout
            if run.saves_after(rollout_id) and not args.fully_async:
                run.save(rollout_id)
            if publishes:
                if following is not None:
                    run.wait_for_generation(following)
                run.sync_weights(for_save=run.saves_after(rollout_id))
            if run.saves_after(rollout_id) and args.fully_async:
                run.save(rollout_id)  # with the tokens of what the weight sync ended
            if publishes and (not args.fully_async or rollout_id == start or run.saves_after(rollout_id)):
                run.check_log_probs()  # samples anew, which a worker that never idles would wait for in every step
            if run.evaluates_after(rollout_id):
                run.evaluate(rollout_id)
            run.end_step(rollout_id)


if __name__ == "__main__":
    run_or_exit(train_async, synchronous=False)
