"""Requests to the engines, from token ids to token ids. Read in this order: `engine_client`, `call`, `retries`,
`engine_pool`, `upstream`, `wire`; then `pairing` (prefill and decode engines) and `teacher_client`.
"""
