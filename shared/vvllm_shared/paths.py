"""Where sockets, state and configuration live. Nothing here is ever below /tmp by default.

Runtime directory: `$VVLLM_RUNTIME_DIR`, else `$RUNTIME_DIRECTORY` (systemd), else `$XDG_RUNTIME_DIR/vvllm-ms`,
else a private directory in the user's home. In it `http.sock` and `private/` (0700).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vvllm_shared import limits
from vvllm_shared.errors import ConfigError

SYSTEM_SOCKET = Path("/run/vvllm-ms/http.sock")
"""Where a system-wide daemon (under systemd) listens."""


@dataclass(frozen=True)
class RuntimePaths:
    """The files of one daemon, all below `root`."""

    root: Path

    @property
    def http(self) -> Path:
        """The socket for clients: OpenAI's API and `/vvllm/*`."""
        return self.root / "http.sock"

    @property
    def private(self) -> Path:
        """0700: what only the daemon and its own children may reach."""
        return self.root / "private"

    @property
    def lock(self) -> Path:
        """Held (flock) as long as the daemon lives; holds its pid."""
        return self.private / "lock"

    @property
    def traces(self) -> Path:
        """The policy process binds PULL here; the engine connects PUSH."""
        return self.private / "traces.sock"

    @property
    def residency(self) -> Path:
        """The daemon binds ROUTER here; the policy process connects DEALER."""
        return self.private / "residency.sock"

    @property
    def rpc(self) -> Path:
        """vLLM's own ipc files (`VLLM_RPC_BASE_PATH`)."""
        return self.private / "rpc"

    def check_lengths(self) -> None:
        """Refuse a root so long that a socket's path would not fit `sun_path`.

        Raises:
            ConfigError: naming the path and the limit.
        """
        # vLLM adds "/" and a uuid4 (36 characters) to the rpc directory.
        for path in (self.http, self.traces, self.residency, self.rpc / ("u" * 36)):
            if len(os.fsencode(path)) > limits.SOCKET_PATH_BYTES:
                raise ConfigError(
                    f"The socket path {path} is {len(os.fsencode(path))} bytes long; "
                    f"Unix sockets allow {limits.SOCKET_PATH_BYTES}.",
                    "Set VVLLM_RUNTIME_DIR to a shorter directory.",
                )


def runtime_paths(env: Mapping[str, str] = os.environ) -> RuntimePaths:
    """The runtime directory of this user's daemon, by the order above. Creates nothing."""
    if chosen := env.get("VVLLM_RUNTIME_DIR") or env.get("RUNTIME_DIRECTORY"):
        return RuntimePaths(Path(chosen.split(":")[0]))
    if xdg := env.get("XDG_RUNTIME_DIR"):
        return RuntimePaths(Path(xdg) / "vvllm-ms")
    return RuntimePaths(Path(env.get("HOME") or Path.home()) / ".vvllm-ms" / "run")


def client_sockets(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a client looks for a daemon when neither `--socket` nor `$VVLLM_HOST` names one, in order."""
    return [runtime_paths(env).http, SYSTEM_SOCKET]


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Profiles and manifests: `$STATE_DIRECTORY` (systemd) or `$XDG_STATE_HOME/vvllm-ms`."""
    if given := env.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    home = Path(env.get("HOME") or Path.home())
    return Path(env.get("XDG_STATE_HOME") or home / ".local" / "state") / "vvllm-ms"


def config_files(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Configuration files that the daemon reads when `--config` names none; the first that exists wins."""
    home = Path(env.get("HOME") or Path.home())
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "vvllm-ms" / "vvllm-msd.toml"
    return [user, Path("/etc/vvllm-ms/vvllm-msd.toml")]
