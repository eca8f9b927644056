"""Weight versions in a shared folder. Most of them are exact deltas against the previous version.

    trainer                                     the folder                        on each engine's host
    encodings, writer  ── files of a version ──►  weight_v000012/  ──► local_checkpoint ──► engine
    channel            ── calls ──► mailbox ──►   agents/<engine>/ ──► serving/weights_agent.py

`folder` defines the manifest of a version and the rules for chaining and deleting versions.
"""
