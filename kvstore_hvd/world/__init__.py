"""This process and the worlds that it is in."""
