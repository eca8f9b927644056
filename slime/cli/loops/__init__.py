"""The two loops of the repository's root, where an installed package finds them: links, so there is one of each."""
