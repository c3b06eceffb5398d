"""Pretend hosts on one Linux machine: `tests.lab.lab.Lab` for tests, `python -m tests.lab` by hand."""
