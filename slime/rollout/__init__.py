"""Rollout: from prompt groups to finished, scored groups, over HTTP against the engines.

`manager` composes the room. Who asks whom: a schedule (`schedules/`, by name) makes the batch of a step, mostly with
`group_loop`, which runs groups (`execute`) through a generate function (`generate`), which asks engines (`client`).
Users' functions are loaded and called by `hooks` and see `context`. `evaluate` scores held-out data.
"""
