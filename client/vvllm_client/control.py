"""`vvllm-ctl`: looks at the daemon and steers it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from vvllm_client.terminal import Sink, guarded
from vvllm_shared.errors import Exit, VvllmError

PROG = "vvllm-ctl"

_STATUS_EPILOG = """\
exit codes: 0 ready, 2 usage, 69 no daemon, 70 failed, 75 loading, restarting or draining, 77 not allowed,
78 bad $VVLLM_HOST
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return guarded(PROG, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    code: int = args.command(args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description="Look at the vvllm-ms daemon and steer it.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    status = commands.add_parser(
        "status",
        help="what the daemon is doing",
        description="Show what the daemon is doing; succeeds only when it is ready.",
        epilog=_STATUS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    status.add_argument("--json", action="store_true", help="the daemon's own JSON, on one line")
    status.add_argument("--socket", metavar="PATH", help="the daemon's Unix socket")
    status.set_defaults(command=_status)
    return parser


def _status(args: argparse.Namespace) -> int:
    from vvllm_client.status_view import exit_code, table
    from vvllm_client.sync_client import Client

    stdout = Sink(sys.stdout)
    try:
        status = Client(args.socket).status()
    except VvllmError as error:
        if args.json and error.exit_code != Exit.USAGE:
            stdout.write(json.dumps(error.as_json()) + "\n")
            return error.exit_code
        raise
    stdout.write(json.dumps(status) + "\n" if args.json else table(status))
    return exit_code(status)
