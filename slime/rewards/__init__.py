"""Graders score finished samples, in processes that can be killed.

`graders` contains the graders and their interface, `scores` the result types. The rollout calls `pool`, which starts
processes through `grader_process`, and each process runs `grader_worker`. Grader libraries are imported only there.
"""
