"""Graders: from a finished sample to a score, behind one contract, run where they can be killed.

`types` is the contract, `graders` holds one grader per file, `worker` is the killable process, `pool` the room's front.
Imports core and config only; a grader's own libraries are imported inside its worker.
"""
