"""One engine run for `vvllm-msd verify`: prompts in, tokens and logprobs of every position out.

Run as `python -m vvllm_msd.verify_engine` it reads a `Job` as JSON from stdin and writes the `Answer`s as JSON to
the file descriptor named in its only argument: each engine gets a process, so that its device memory is free again
when the next one starts. Tests call `run` and keep many engines in one process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from vvllm_shared.errors import VvllmError

Logprobs = list[dict[int, float]]
"""For each position the most probable tokens and their logprobs."""


class Job(msgspec.Struct, frozen=True):
    """One engine and what it is asked."""

    model: str
    batches: list[list[list[int]]]
    """Prompts as token ids; the prompts of a batch are submitted together, batches one after the other."""
    max_tokens: int
    engine: dict[str, Any]
    """Arguments of `vllm.LLM`, `additional_config` included."""


class Answer(msgspec.Struct, frozen=True):
    """What came out for one prompt, greedy."""

    tokens: list[int]
    logprobs: Logprobs
    prompt_logprobs: Logprobs


def set_environment() -> None:
    """What must stand before vllm is imported: one process, no network, no chatter."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def run(job: Job) -> list[Answer]:
    """Start the engine in this process, ask it everything, drop it.

    Raises:
        VvllmError: what the pager refuses.
    """
    set_environment()
    from vllm import LLM, SamplingParams

    llm = LLM(model=job.model, **job.engine)
    sampling = SamplingParams(
        temperature=0, max_tokens=job.max_tokens, ignore_eos=True, logprobs=5, prompt_logprobs=1
    )
    answers = []
    for batch in job.batches:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            completion = output.outputs[0]
            answers.append(
                Answer(
                    list(completion.token_ids),
                    _plain(completion.logprobs or []),
                    _plain((output.prompt_logprobs or [])[1:]),
                )
            )
    return answers


def _plain(positions: list[Any]) -> Logprobs:
    return [{token: entry.logprob for token, entry in position.items()} for position in positions]


def main() -> int:
    """The process's side of `verify.run_engine`."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result: dict[str, Any]
    try:
        result = {"answers": run(job)}
    except VvllmError as error:
        result = {"error": [type(error).__name__, error.sentence, error.hint]}
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        out.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
