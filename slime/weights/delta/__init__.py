"""Weight versions in a shared folder, most of them as exact deltas to the version before.

    trainer                                     the folder                        beside each engine
    encodings, writer  ── files of a version ──►  weight_v000012/  ──► local_checkpoint ──► engine
    channel            ── calls ──► mailbox ──►   agents/<engine>/ ──► serving/weights_agent.py

`folder` has the manifest of a version, and the rules of which version follows on which and which may be removed.
"""
