"""A generation on the screen or in a pipe: as text, or as one JSON object a line."""

from __future__ import annotations

import json
from typing import Protocol

from vvllm_client.events import Event, Start, Token
from vvllm_client.quantities import percent, size
from vvllm_client.stats import Report
from vvllm_client.terminal import Sink
from vvllm_shared.errors import VvllmError

SCHEMA = 1
"""Of the `--json` lines; grows when a field changes its meaning or goes."""


class Output(Protocol):
    """Where a generation goes."""

    def show(self, event: Event) -> None:
        """One event, as it comes."""

    def report(self, report: Report) -> None:
        """The numbers, after a complete generation."""

    def fail(self, error: VvllmError) -> None:
        """The reason why there is no (more) answer."""

    def close(self, exit_code: int, finish_reason: str | None) -> None:
        """The last word."""


class TextOutput:
    """The answer on stdout; reasoning, numbers and errors on stderr."""

    def __init__(self, prog: str, stdout: Sink, stderr: Sink) -> None:
        self._prog = prog
        self._stdout = stdout
        self._stderr = stderr

    def show(self, event: Event) -> None:
        """Write a token where its channel goes."""
        if not isinstance(event, Token):
            return
        if event.channel == "reasoning":
            self._stderr.write(event.text, dim=True)
        else:
            self._stderr.end_line()
            self._stdout.write(event.text)

    def report(self, report: Report) -> None:
        """End the answer's line; the numbers are for who asks with --stats."""
        self._end_lines()

    def fail(self, error: VvllmError) -> None:
        """Sentence and hint, below what has come of the answer."""
        self._end_lines()
        self._stderr.write(f"{self._prog}: {error}\n")

    def close(self, exit_code: int, finish_reason: str | None) -> None:
        """Leave a terminal at the start of a line; tell a person of an answer that a limit cut."""
        self._end_lines()
        if finish_reason == "length" and self._stderr.is_terminal:
            self._stderr.write("[cut at the token limit; --max-tokens sets it]\n", dim=True)

    def _end_lines(self) -> None:
        self._stderr.end_line()
        self._stdout.end_line()


class JsonOutput:
    """Everything on stdout: start, token, usage, error, end; `end` is always the last line."""

    def __init__(self, stdout: Sink) -> None:
        self._stdout = stdout

    def show(self, event: Event) -> None:
        """Write start and tokens; usage and end wait for the numbers."""
        match event:
            case Start(model, request_id):
                self._line(type="start", schema=SCHEMA, model=model, id=request_id)
            case Token(text, channel):
                self._line(type="token", channel=channel, text=text)

    def report(self, report: Report) -> None:
        """Write usage."""
        cache = report.cache and {
            "hits": report.cache.hits,
            "misses": report.cache.misses,
            "hit_rate": report.cache.hit_rate,
            "bytes_paged": report.cache.bytes_paged,
        }
        self._line(
            type="usage",
            prompt_tokens=report.usage and report.usage.prompt_tokens,
            completion_tokens=report.usage and report.usage.completion_tokens,
            first_token_s=report.first_token_s,
            tokens_per_s=report.tokens_per_s,
            cache=cache,
        )

    def fail(self, error: VvllmError) -> None:
        """Write error."""
        self._line(type="error", **error.as_json())

    def close(self, exit_code: int, finish_reason: str | None) -> None:
        """Write end."""
        self._line(type="end", finish_reason=finish_reason, exit_code=int(exit_code))

    def _line(self, **fields: object) -> None:
        self._stdout.write(json.dumps(fields) + "\n")


def stats_text(report: Report) -> str:
    """What --stats prints: two lines, for a person."""
    first = "-" if report.first_token_s is None else f"{report.first_token_s:.3f} s"
    rate = "-" if report.tokens_per_s is None else f"{report.tokens_per_s:.1f} tok/s"
    prompt, completion = (
        (report.usage.prompt_tokens, report.usage.completion_tokens) if report.usage else ("-", "-")
    )
    lines = [f"first token {first} · {rate} · {prompt} prompt + {completion} completion tokens"]
    if cache := report.cache:
        lines.append(
            f"cache {cache.hits:,} hits, {cache.misses:,} misses ({percent(cache.hit_rate)} hits) · "
            f"{size(cache.bytes_paged)} paged in"
        )
    else:
        lines.append("cache: no numbers (the server has none, or its engine was restarted)")
    return "\n".join(lines) + "\n"
