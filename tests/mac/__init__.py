"""What only two real Macs can show: `python -m tests.mac HOST MODEL_DIR`."""
