"""Weight versions in a shared folder, most of them as exact deltas to the previous version.

    trainer                                     the folder                        on each engine's host
    encodings, writer  ── files of a version ──►  weight_v000012/  ──► local_checkpoint ──► engine
    channel            ── calls ──► mailbox ──►   agents/<engine>/ ──► serving/weights_agent.py

`folder` defines a version's manifest and the rules for the order and removal of versions.
"""
