"""The two loops of the repository's root, as links, so that an installed package contains them, too."""
