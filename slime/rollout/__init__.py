"""Rollout: from prompt groups to finished, scored groups, over HTTP against the router.

`client` talks to the engines, `context` is what generate functions see, `generate` is the default generation of one
sample, `execute` runs one group, `loop` one step, `evaluate` the held-out data; `manager` composes them.
"""
