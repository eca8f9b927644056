"""The fleet: which engines exist, on which hosts, in which state, at which weight version.

`supervisor` has the record of an engine, the list of them, and what keeps them alive. It starts and asks engines
through a port: `slime.cluster.ray_engines` on Ray, `external` for servers that somebody else started, which `fitting`
checks.
"""
