"""Attention and layers that one family has and the others have not; `layers.py` puts them in their places."""
