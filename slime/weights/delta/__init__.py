"""Weight versions in a shared folder, most of them as what changed since the version before, exact to the bit.

    trainer                                   the folder                            beside each engine
    encodings, writer  ── files of a version ──►  weight_v000012/  ──► local   (materialised checkpoint) ──► engine
    channel            ── calls ──► mailbox ──►   agents/<engine>/ ──► serving/weights_agent.py

`manifest` says what a version consists of, `chain` which versions follow on which and which may go.
"""
