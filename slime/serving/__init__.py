"""SGLang servers, routers and the engines' control plane. Only this room and compat import SGLang.

Importing this package imports nothing heavy: SGLang runs in the processes that `launch` starts.
"""
