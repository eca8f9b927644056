"""SGLang servers, routers and the control plane of engines. Only this room and compat import SGLang.

Importing this package imports nothing heavy: SGLang runs in the processes that `launch` starts.
"""
