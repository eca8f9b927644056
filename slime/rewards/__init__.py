"""Graders: they score finished samples, in processes that can be killed.

`graders` contains the graders and their contract, and `scores` the result types. The rollout calls `pool`, which starts
processes through `grader_process`; each process runs `grader_worker`. A grader's libraries are imported only in its
process.
"""
