"""The kernel seam: what a laptop and a GPU compute with different implementations of one formula."""
