"""The identifiers that travel: distinct types, so that they cannot be mixed up."""

from typing import NewType

ModelId = NewType("ModelId", str)
"""What a client writes in `model`: a folder's name, or Org/Name."""

SeqId = NewType("SeqId", int)
"""One sequence (a prompt and what is generated after it) inside one engine; never used twice."""

PlanId = NewType("PlanId", int)
"""A step's number within its epoch: 0, 1, 2, ... without gaps."""

Epoch = NewType("Epoch", int)
"""Counts the rebuilds of a pipeline: it grows by one whenever a stage was lost."""

BlockId = NewType("BlockId", bytes)
"""A run of tokens and all that came before it, as a chained digest of 16 bytes."""
