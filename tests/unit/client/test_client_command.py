"""`vvllm-client` as users run it: the installed command, a real socket, real pipes, signals and terminals."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from scripted_daemon import WAIT, ScriptedDaemon, answer, chunk, refusal, usage

from vvllm_shared.errors import EngineDiedError

CHAT, RAW = "/v1/chat/completions", "/v1/completions"

Run = Callable[..., subprocess.CompletedProcess[str]]
Popen = Callable[..., "subprocess.Popen[bytes]"]


def prompt_of(daemon: ScriptedDaemon) -> Any:
    return daemon.chats[-1]["messages"][-1]["content"]


# --- The answer


def test_only_the_answer_is_on_stdout(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    done = run("vvllm-client", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello", "")


def test_reasoning_goes_to_stderr_plain_when_piped(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer([chunk(reasoning="Hm."), chunk("Yes"), chunk(finish="stop")])
    done = run("vvllm-client", "hi", "--think")
    assert (done.stdout, done.stderr) == ("Yes", "Hm.")
    assert daemon.chats[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_every_option_arrives(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    flags = [
        "--no-think",
        "--max-tokens=5",
        "--temperature=0",
        "--top-p=0.5",
        "--seed=9",
        "--stop=a",
        "--stop=b",
    ]
    assert run("vvllm-client", "--system", "be brief", *flags, "hi").returncode == 0
    assert daemon.chats == [
        {
            "model": "tiny-moe",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0.0,
            "top_p": 0.5,
            "seed": 9,
            "stop": ["a", "b"],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


def test_raw_sends_the_prompt_as_it_is(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[RAW] = answer([{"model": "m", "choices": [{"text": " there", "finish_reason": "length"}]}])
    done = run("vvllm-client", "--raw", stdin=b"Hello\n")
    assert (done.returncode, done.stdout) == (0, " there")
    assert daemon.chats[0]["prompt"] == "Hello\n"


def test_a_pipe_gets_the_models_bytes_unchanged(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer([chunk("\x1b[31mré\x07\r\n"), chunk(finish="stop")])
    assert run("vvllm-client", "hi", env={"LC_ALL": "C", "PYTHONUTF8": "0"}).stdout == "\x1b[31mré\x07\r\n"


# --- The prompt


def test_stdin_comes_before_the_prompt(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    run("vvllm-client", "Summarise this.", stdin="a täxt\n".encode())
    assert prompt_of(daemon) == "a täxt\n\nSummarise this."


@pytest.mark.parametrize("arguments", [[], ["-"], [""]])
def test_stdin_alone_is_the_prompt(daemon: ScriptedDaemon, run: Run, arguments: list[str]) -> None:
    daemon.routes[CHAT] = answer()
    assert run("vvllm-client", *arguments, stdin=b"hi\n").returncode == 0
    assert prompt_of(daemon) == "hi\n"


def test_a_pipe_that_nobody_writes_to_is_named(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer()
    process = popen("vvllm-client", "hi", stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert b"reading standard input until it ends" in process.stderr.readline()
    assert process.communicate(b"", timeout=30)[0] == b"Hello"
    assert prompt_of(daemon) == "hi"


def test_a_pipe_that_does_not_block_is_read_to_its_end(daemon: ScriptedDaemon, popen: Popen) -> None:
    """As parents with an event loop hand them out: what has not come yet is not the end."""
    daemon.routes[CHAT] = answer()
    read, write = os.pipe()
    os.set_blocking(read, False)
    process = popen("vvllm-client", "hi", stdin=read)
    os.close(read)
    for part in (b"one ", b"two"):
        time.sleep(0.4)
        os.write(write, part)
    os.close(write)
    assert process.communicate(timeout=30)[0] == b"Hello"
    assert prompt_of(daemon) == "one two\n\nhi"


@pytest.mark.parametrize("before", ["", "os.close(0)"], ids=["null", "closed"])
def test_a_prompt_needs_no_stdin(daemon: ScriptedDaemon, run: Run, before: str) -> None:
    daemon.routes[CHAT] = answer()
    done = run("vvllm-client", "hi", before=before)
    assert (done.returncode, done.stdout) == (0, "Hello")
    assert prompt_of(daemon) == "hi"


def test_a_prompt_that_looks_like_an_option(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    assert run("vvllm-client", "--", "--help").returncode == 0
    assert prompt_of(daemon) == "--help"


@pytest.mark.parametrize("arguments", [[], ["-"], [""]])
@pytest.mark.parametrize("before", ["", "os.close(0)"], ids=["null", "closed"])
def test_no_prompt_at_all_is_a_mistake(run: Run, arguments: list[str], before: str) -> None:
    done = run("vvllm-client", *arguments, before=before)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: vvllm-client")
    assert "there is no prompt" in done.stderr


def test_no_prompt_on_a_terminal_shows_help_and_does_not_wait(run: Run) -> None:
    master, terminal = os.openpty()
    try:
        done = run("vvllm-client", stdin_file=terminal)
    finally:
        os.close(master)
        os.close(terminal)
    assert done.returncode == 2
    assert "--max-tokens" in done.stderr


def test_stdin_that_is_not_utf8_is_refused(daemon: ScriptedDaemon, run: Run) -> None:
    done = run("vvllm-client", "hi", stdin=b"caf\xe9")
    assert done.returncode == 65
    assert "not UTF-8: byte 0xe9 at offset 3" in done.stderr
    assert "iconv" in done.stderr
    assert daemon.seen == []


def test_an_argument_that_is_not_utf8_is_refused(daemon: ScriptedDaemon, run: Run) -> None:
    done = run("vvllm-client", b"caf\xe9")
    assert done.returncode == 65
    assert "not valid Unicode" in done.stderr


# --- For programs and for the curious


def test_json_lines(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer(
        [chunk(reasoning="Hm\x1b"), chunk("Yes"), chunk("."), chunk(finish="length"), usage(5, 3)]
    )
    done = run("vvllm-client", "hi", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[4].pop("first_token_s") > 0
    assert lines[4].pop("tokens_per_s") is None, "all of it came at once"
    assert lines == [
        {"type": "start", "schema": 1, "model": "tiny-moe", "id": "chatcmpl-1"},
        {"type": "token", "channel": "reasoning", "text": "Hm\x1b"},
        {"type": "token", "channel": "answer", "text": "Yes"},
        {"type": "token", "channel": "answer", "text": "."},
        {
            "type": "usage",
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cache": {"hits": 30, "misses": 10, "hit_rate": 0.75, "bytes_paged": 10 << 20},
        },
        {"type": "end", "finish_reason": "length", "exit_code": 0},
    ]


def test_stats_go_to_stderr(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    done = run("vvllm-client", "hi", "--stats")
    assert done.stdout == "Hello"
    first, second = done.stderr.splitlines()
    assert first.startswith("first token 0.")
    assert first.endswith(" s · - · 5 prompt + 3 completion tokens"), "text that came at once has no speed"
    assert second == "cache 30 hits, 10 misses (75.0% hits) · 10.0 MiB paged in"


def test_a_plain_vllm_answers_too(tcp_daemon: ScriptedDaemon, run: Run) -> None:
    tcp_daemon.routes[CHAT] = answer()
    tcp_daemon.routes["/vvllm/status"] = refusal({"detail": "Not Found"}, 404)
    port = tcp_daemon.listener.getsockname()[1]
    done = run("vvllm-client", "hi", "--stats", env={"VVLLM_HOST": f"http://127.0.0.1:{port}"})
    assert (done.returncode, done.stdout) == (0, "Hello")
    assert "cache: no numbers" in done.stderr


# --- On a terminal


def on_a_terminal(popen: Popen, *arguments: str, **env: str) -> tuple[int, str]:
    """Exit code and what the screen got, stdout and stderr together."""
    master, terminal = os.openpty()
    process = popen(
        "vvllm-client", *arguments, stdout=terminal, stderr=terminal, env={"TERM": "xterm", **env}
    )
    os.close(terminal)
    screen = b""
    with os.fdopen(master, "rb", buffering=0) as reader:
        try:
            while data := reader.read(65536):
                screen += data
        except OSError:  # EIO: the last writer is gone
            pass
    return process.wait(WAIT), screen.decode().replace("\r\n", "\n")


HOSTILE = [
    chunk(reasoning="\x1b]0;t\x07Hm"),
    chunk("\x1b[2J\x9b1mYes\x08\x7f\r"),
    chunk("\tok", finish="stop"),
]


def test_the_model_cannot_drive_the_terminal(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer(HOSTILE)
    assert on_a_terminal(popen, "hi") == (0, "\x1b[2m]0;tHm\x1b[22m\n[2J1mYes\tok\n")


def test_no_color(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer(HOSTILE)
    assert on_a_terminal(popen, "hi", NO_COLOR="1") == (0, "]0;tHm\n[2J1mYes\tok\n")


def test_an_error_starts_on_a_line_of_its_own(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer([chunk("Hel"), EngineDiedError("It \x1bdied.", "Again.").as_json()])
    assert on_a_terminal(popen, "hi") == (1, "Hel\nvvllm-client: It died.\n  Again.\n")


def test_a_cut_answer_is_told_to_a_person(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer([chunk("Hel\n", finish="length")])
    code, screen = on_a_terminal(popen, "hi", "--max-tokens", "1", NO_COLOR="1")
    assert (code, screen) == (0, "Hel\n[cut at the token limit; --max-tokens sets it]\n")


def test_stats_start_on_a_line_of_their_own(daemon: ScriptedDaemon, popen: Popen) -> None:
    daemon.routes[CHAT] = answer()
    code, screen = on_a_terminal(popen, "hi", "--stats")
    assert code == 0
    assert screen.startswith("Hello\nfirst token ")


# --- Help


def test_help_names_every_option_and_exit_code(run: Run) -> None:
    done = run("vvllm-client", "--help")
    assert done.returncode == 0
    options = [
        "--system",
        "--raw",
        "--think, --no-think",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--seed",
    ]
    for word in [*options, "--stop", "--json", "--stats", "--socket", "$VVLLM_HOST", "141 stdout closed"]:
        assert word in done.stdout


def test_help_into_a_closed_pipe_is_quiet(run: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as gone:
        done = run("vvllm-client", "--help", stdout=gone)
    assert (done.returncode, done.stderr) == (141, "")
