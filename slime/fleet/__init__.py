"""The fleet: the engines of a run, with their hosts, states and weight versions.

`supervisor` defines the record of an engine and the list of engines, and keeps the engines alive. It starts and watches
them through a port: `slime.cluster.engine_actors` on Ray, or `external` for servers that somebody else started.
`fitting` checks whether such a server fits the run.
"""
