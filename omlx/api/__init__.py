"""HTTP: dialects translate to the chat layer and back; nothing here knows tokens or stages."""
