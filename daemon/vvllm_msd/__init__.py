"""The daemon: it owns the engine, the policy process, the sockets and the exit code."""
