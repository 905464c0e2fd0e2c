"""Every bound on what arrives from outside a process, in one table."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
"""Every option that ends in `_gb` counts these, as vLLM's own do."""

# HTTP, on the daemon's socket
HEADER_BYTES = 64 * KIB
"""Request line and headers of one HTTP request."""
BODY_BYTES = 16 * MIB
"""Body of one HTTP request: a 1M-token prompt is about 5 MiB of text."""
TOKENIZE_BYTES = 256 * KIB
"""Body of a request that only tokenizes: it holds Python's lock, and everyone's streams wait (3 MiB: 6 s)."""
READ_SECONDS = 20.0
"""From the first byte of a request to the last byte of its body."""
WRITE_STALL_SECONDS = 30.0
"""How long a client may leave its answer unread before its request is aborted."""
CONNECTIONS = 256
"""Open connections at a time on the daemon's socket."""

# ZeroMQ, between daemon, engine and policy process
FRAME_BYTES = 4 * MIB
"""One message; the sockets' MAXMSGSIZE, and checked again before decoding."""
MESSAGE_ITEMS = 1 << 14
"""Values in one message at all depths together: a hello of `LAYERS` layers has about 11,300."""
TEXT_CHARS = 512
"""Characters of one string in a message."""
NESTING = 8
"""Depth of MessagePack arrays and maps."""
TRACE_QUEUE = 64
"""Trace messages that may wait for a lagging policy process before new ones are dropped."""
ADVICE_QUEUE = 16
"""Messages of the policy process that may wait for the daemon; the next ones wait at the sender."""
BAD_MESSAGES = 16
"""Malformed messages after which a policy session is closed."""

# Model shapes
EXPERTS = 4096
"""Experts per layer that a message may speak of."""
LAYERS = 1024
SLOTS = 992
"""Slots per layer: vLLM's block alignment kernel wants fewer than 1,024 padded experts."""
TOP_K = 64
CACHE_GB = 1024.0
"""GiB of VRAM for experts that an option may ask for."""

# Unix sockets
SOCKET_PATH_BYTES = 107
"""sun_path is 108 bytes with its NUL."""
