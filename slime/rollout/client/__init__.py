"""Engine clients: token ids in, token ids out. Suggested reading order: `engine_client`, `call`, `retries`,
`engine_pool`, `upstream`, `wire`; then `pairing` (prefill and decode engines) and `teacher_client`.
"""
