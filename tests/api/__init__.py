"""Tests of the HTTP side, over a scripted model and a real server."""
