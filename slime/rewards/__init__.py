"""Graders: from a finished sample to a score, in processes that can be killed.

`graders` holds the graders and their contract, `scores` the results, `grader_worker` is the killable process, `process`
its parent's side, and `pool` what the rollout calls. A grader's own libraries are imported inside its process.
"""
