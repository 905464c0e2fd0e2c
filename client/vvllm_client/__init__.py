"""The light client: standard library only."""
