"""`vvllm-msd`: the daemon and what goes with it.

Keep this module light: vLLM's engine processes are spawned, and a spawned process imports its parent's main module,
which is this one, before anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vvllm_msd.endings import report
from vvllm_shared.errors import Exit, UsageError
from vvllm_shared.processes import die_with_parent

_PARENT = "_VVLLM_PARENT"
"""Variable with the pid of the process that spawns others: one that starts after its end must notice."""

if "__mp_main__" in sys.modules:
    # multiprocessing's name for its parent's main module: we are an engine process, seconds before its own code
    # runs, with torch and vllm still to be imported. From here on it cannot outlive the process that started it,
    # even if that one is killed during those imports. multiprocessing.parent_process() is not set so early, hence
    # the variable.
    die_with_parent(int(os.environ[_PARENT]) if _PARENT in os.environ else None)
    os.environ[_PARENT] = str(os.getpid())
    # Ctrl-C on the terminal is for the daemon, which lets running requests end before it ends us.
    os.setpgid(0, 0)

_FLAGS = (
    ("--model", "model", "DIR", 'directory of the checkpoint, or "demo" for the embedded model'),
    ("--slots", "cache.slots", "N", "experts per layer that stay in VRAM"),
    ("--cache-gb", "cache.cache_gb", "G", "GiB of VRAM for experts, instead of --slots"),
    ("--max-num-seqs", "server.max_num_seqs", "N", "requests that decode together (4)"),
    ("--max-model-len", "server.max_model_len", "N", "tokens of prompt and answer (at most 32768)"),
    ("--policy", "policy.name", "NAME", "which experts to keep: lfru, layer or off (lfru)"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error (info)"),
)
"""Flags of `serve`: name, configuration key, metavar, help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code (see `vvllm_shared.errors.Exit`)."""
    os.environ[_PARENT] = str(os.getpid())
    try:
        args = _parse(argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except Exception as error:
        return report(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from vvllm_msd.config import did_you_mean

    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        option = unknown[0].partition("=")[0]
        suggestion = did_you_mean(option, args.known) if option.startswith("-") else ""
        raise UsageError(
            f"Unknown argument {option}.",
            suggestion or f"vvllm-msd {args.command} --help shows what there is.",
        )
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vvllm-msd",
        description="Serves Mixture-of-Experts models that are larger than the GPU's memory.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run, known=sub._option_string_actions)
        return sub

    serve = command("serve", _serve, "Run the daemon in the foreground.")
    serve.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file instead of the usual ones"
    )
    for flag, key, metavar, text in _FLAGS:
        serve.add_argument(flag, dest=key, metavar=metavar, help=f"{text} [{key}]")
    serve.add_argument(
        "--vision",
        dest="server.vision",
        action="store_const",
        const="true",
        help="load the vision part [server.vision]",
    )
    serve.add_argument(
        "--json-log", dest="log.json", action="store_const", const="true", help="log as JSON [log.json]"
    )
    serve.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of vLLM's engine [engine.NAME]",
    )

    verify = command("verify", _verify, "Compare the paged engine's tokens and logprobs with a reference.")
    verify.add_argument("--model", required=True, metavar="DIR", help="directory of the checkpoint")
    size = verify.add_mutually_exclusive_group(required=True)
    size.add_argument("--slots", type=int, metavar="N", help="experts per layer that stay in VRAM")
    size.add_argument("--cache-gb", type=float, metavar="G", help="GiB of VRAM for experts")
    verify.add_argument(
        "--reference",
        choices=("stock", "offload", "self"),
        default="stock",
        help="vLLM with all experts in VRAM, vLLM with its own offload, or other numbers of slots (stock)",
    )
    verify.add_argument("--layers", type=int, metavar="K", help="cut both engines to the first K layers")
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    models = command(
        "models", _models, "Show which formats of which families are served, and what showed it."
    )
    models.add_argument("--json", action="store_true", help="print JSON, with every record")

    command("demo", _demo, "Start on the embedded model, send it a prompt, show the cache, stop.")
    return parser


def _serve(args: argparse.Namespace) -> int:
    from vvllm_msd.config import Given, load

    flags = {flag.dest: flag.option_strings[0] for flag in args.known.values()}
    given = [
        Given(key, value, "flag", flags[key])
        for key, value in vars(args).items()
        if key in flags and key not in ("config", "engine") and value is not None
    ]
    for option in args.engine:
        name, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--engine {option} has no value.", "Write --engine NAME=VALUE.")
        given.append(Given(f"engine.{name}", value, "flag", "--engine"))
    config = load(given, args.config)

    from vvllm_msd import lifecycle

    return lifecycle.serve(config)


def _verify(args: argparse.Namespace) -> int:
    from vvllm_msd import verify

    return verify.main(args)


def _models(args: argparse.Namespace) -> int:
    from vvllm_msd import models

    found = models.rows(models.read_records())
    sys.stdout.write((models.as_json if args.json else models.table)(found) + "\n")
    return int(Exit.OK)


def _demo(args: argparse.Namespace) -> int:
    from vvllm_msd import demo

    return demo.main(args)
