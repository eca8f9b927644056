"""What stock upstreams need on a machine without a GPU, one file per upstream.

Nothing happens on import. Each patch is a function that says which symptom it cures, on which upstream version, when it
can go, and that checks its own effect.
"""
