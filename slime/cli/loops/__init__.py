"""Links to the two loops in the repository's root, so that an installed package contains them."""
