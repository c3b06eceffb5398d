"""Before the first token, and after a failure: planning, placing and watching stages."""
