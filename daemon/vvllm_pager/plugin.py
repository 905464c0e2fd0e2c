"""Registration with vLLM (placeholder while the layers are being written)."""


def register_layers() -> None:
    """Nothing is replaced yet."""
