"""Names that plugins of the public slime import. Nothing in slime imports them, and nothing is made here."""
