"""Developer benches, one question a file: `python -m bench NAME`. BASELINE.md keeps the figures."""
