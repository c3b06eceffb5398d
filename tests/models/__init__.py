"""Models that tests build for themselves."""
