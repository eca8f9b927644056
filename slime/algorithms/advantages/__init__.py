"""Advantages and returns, NumPy float64 on the host, from the whole batch."""
