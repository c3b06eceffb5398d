"""From token ids to text and back: pure, incremental, one object per answer."""
