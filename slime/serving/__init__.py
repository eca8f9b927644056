"""SGLang servers, the router in front of them and their control plane. The only room, with compat, that imports SGLang.

Importing this package imports nothing heavy: SGLang lives in the processes that `launch` starts.
"""
