"""The fleet: a run's engines with their hosts, states and weight versions.

`supervisor` defines the engine record and the membership, and keeps engines running. It starts and watches engines
through a port: `slime.cluster.engine_actors` on Ray, or `external` for servers that the run did not start. `fitting`
checks whether such a server is compatible with the run.
"""
