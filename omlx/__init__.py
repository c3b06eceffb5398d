"""oMLX cluster: one OpenAI-compatible server over one or many Macs."""

__version__ = "0.1.0"
