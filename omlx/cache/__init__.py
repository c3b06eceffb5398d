"""What is kept of computed prefixes, in RAM and on SSD: blocks, their index, their files."""
