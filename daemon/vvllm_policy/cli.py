"""The command `vvllm-policy`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from vvllm_policy.policies import POLICIES
from vvllm_policy.service import Service
from vvllm_shared import logs
from vvllm_shared.errors import Exit, VvllmError
from vvllm_shared.paths import RuntimePaths, runtime_paths
from vvllm_shared.processes import die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the result is its exit code."""
    arguments = _parser().parse_args(argv)
    logs.set_up("vvllm-policy", arguments.log_level, arguments.json_log)
    try:
        _serve(arguments)
    except VvllmError as error:
        logs.get().error("policy_failed", code=error.code, reason=error.sentence, hint=error.hint)
        return error.exit_code
    return Exit.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vvllm-policy",
        description="Advises the pager which experts to keep, from what the router chooses.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve a daemon, which normally starts this by itself")
    serve.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        help="the daemon's runtime directory (default: $VVLLM_RUNTIME_DIR and so on)",
    )
    serve.add_argument("--policy", choices=sorted(POLICIES), default="lfru", help="default: %(default)s")
    serve.add_argument("--parent", type=int, metavar="PID", help="end when this process, the parent, ends")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    serve.add_argument(
        "--json-log",
        action=argparse.BooleanOptionalAction,
        help="log as JSON, or not (default: unless stderr is a terminal)",
    )
    return parser


def _serve(arguments: argparse.Namespace) -> None:
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    signal.signal(signal.SIGTERM, _exit(Exit.OK))
    signal.signal(signal.SIGINT, _exit(Exit.INTERRUPTED))
    paths = RuntimePaths(arguments.runtime_dir) if arguments.runtime_dir else runtime_paths()
    paths.check_lengths()
    with Service(paths, arguments.policy) as service:
        service.run()


def _exit(code: Exit) -> signal._HANDLER:
    def handle(_signal: int, _frame: FrameType | None) -> None:
        sys.exit(code)

    return handle
