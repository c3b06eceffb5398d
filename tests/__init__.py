"""The tests; the tree below mirrors omlx/."""
