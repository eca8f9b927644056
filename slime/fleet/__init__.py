"""The fleet: the engines of a run, with their hosts, states and weight versions.

`supervisor` defines the record of an engine and the list of engines, and keeps the engines alive. The supervisor starts
and watches engines through a port: `slime.cluster.engine_actors` on Ray, or `external` for servers that the run did not
start. `fitting` checks whether such a server fits the run.
"""
