"""`vvllm-client "prompt"`: streams an answer to the terminal or a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vvllm_client.terminal import Sink, guarded
from vvllm_shared.errors import Exit, UsageError, VvllmError

if TYPE_CHECKING:
    from vvllm_client.render import Output
    from vvllm_client.requests import Sampling
    from vvllm_client.stats import Report
    from vvllm_client.sync_client import Client, Stream

PROG = "vvllm-client"

_EPILOG = """\
What is piped in comes before the prompt, separated by a blank line. Only the answer goes to stdout;
reasoning, numbers and errors go to stderr. Ctrl-C aborts the request in the daemon too.

The daemon is looked for at --socket, else $VVLLM_HOST (unix:///PATH or http://127.0.0.1:PORT), else in the
user's runtime directory, then at /run/vvllm-ms/http.sock.

exit codes: 0 ok, 1 generation failed, 2 usage, 65 bad input, 69 no daemon, 70 internal, 75 busy or loading,
77 not allowed, 78 bad $VVLLM_HOST, 130 interrupted, 141 stdout closed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return guarded(PROG, lambda: _run(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Send a prompt to the vvllm-ms daemon and stream the answer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; `-` reads it from stdin, from a terminal too")
    add("--system", metavar="TEXT", help="the system's message, before the prompt")
    add("--raw", action="store_true", help="continue the prompt as it is, without the model's chat template")
    add("--think", action=argparse.BooleanOptionalAction, help="switch the model's reasoning on or off")
    add(
        "--max-tokens", type=int, metavar="N", help="at most N tokens (with --raw the daemon's default is 16)"
    )
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time")
    add("--top-p", type=float, metavar="P", help="choose among the likeliest tokens that make up P (0 to 1)")
    add("--seed", type=int, metavar="N", help="make the choice of tokens repeatable")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; may be given several times",
    )
    add("--json", action="store_true", help="one JSON object a line: start, token, usage, error, end")
    add("--stats", action="store_true", help="print times, tokens and the cache's hits and misses to stderr")
    add("--socket", metavar="PATH", help="the daemon's Unix socket")
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    # What follows is imported late, so that --help and mistakes answer at once.
    from vvllm_client.prompt import gather
    from vvllm_client.render import JsonOutput, TextOutput
    from vvllm_client.requests import Sampling
    from vvllm_client.sync_client import Client

    stdout = Sink(sys.stdout)
    output: Output = JsonOutput(stdout) if args.json else TextOutput(PROG, stdout, Sink(sys.stderr))
    exit_code, finish_reason = Exit.OK, None
    try:
        if args.raw and (args.system is not None or args.think is not None):
            raise UsageError("--raw has no chat template: --system and --think would have no effect with it.")
        sampling = Sampling(args.max_tokens, args.temperature, args.top_p, args.seed, tuple(args.stop))
        client = Client(args.socket)
        if not (prompt := gather(args.prompt)):
            parser.print_help(sys.stderr)
            parser.exit(Exit.USAGE, f"\n{PROG}: error: there is no prompt, and nothing is piped in\n")
        finish_reason = _generate(client, args, sampling, prompt, output).finish_reason
    except UsageError as error:
        parser.error(str(error))
    except VvllmError as error:
        output.fail(error)
        exit_code = error.exit_code
    except KeyboardInterrupt:
        exit_code = Exit.INTERRUPTED
    output.close(exit_code, finish_reason)
    return exit_code


def _generate(
    client: Client, args: argparse.Namespace, sampling: Sampling, prompt: str, output: Output
) -> Report:
    from vvllm_client.render import stats_text
    from vvllm_client.stats import Meter, cache_use

    counting = args.json or args.stats
    before = _status(client) if counting else None
    client.model()  # asked here, so that the times are the generation's own
    meter = Meter()
    with _stream(client, args, sampling, prompt) as stream:
        for event in stream:
            meter.note(event)
            output.show(event)
    report = meter.report(cache_use(before, _status(client)) if counting else None)
    output.report(report)
    if args.stats:
        Sink(sys.stderr).write(stats_text(report))
    return report


def _stream(client: Client, args: argparse.Namespace, sampling: Sampling, prompt: str) -> Stream:
    if args.raw:
        return client.complete(prompt, sampling=sampling)
    return client.chat(prompt, system=args.system, think=args.think, sampling=sampling)


def _status(client: Client) -> dict[str, object] | None:
    """The daemon's counters; None from a server without: a plain vLLM still answers prompts."""
    try:
        return client.status()
    except VvllmError:
        return None
