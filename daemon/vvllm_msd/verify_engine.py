"""One engine run for `vvllm-msd verify`: prompts in, tokens and logprobs of every position out.

Run as `python -m vvllm_msd.verify_engine FD PID` it reads a `Job` from stdin and writes a `Result` or a `Refusal` to
the file descriptor FD, all msgpack (JSON has no NaN, which a wrong engine may well give); PID is who started it. Each
engine gets a process, so that its device memory is free again when the next one starts. Tests call `run` and keep
many engines in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from vvllm_msd.engine_arguments import WORKER_EXTENSION, kernel_options, set_common_environment
from vvllm_shared.errors import UnsupportedError, VvllmError
from vvllm_shared.messages import LayerShape
from vvllm_shared.processes import die_with_parent

Logprobs = list[dict[int, float]]
"""For each position the most probable tokens and their logprobs."""


class Job(msgspec.Struct, frozen=True):
    """One engine and what it is asked."""

    model: str
    batches: list[list[list[int]]]
    """Prompts as token ids; the prompts of a batch are submitted together, batches one after the other."""
    max_tokens: int
    engine: dict[str, Any]
    """Arguments of `vllm.LLM`, `additional_config` included; the experts' kernel is the daemon's choice."""
    engine_on_cpu: dict[str, Any] = {}
    """More of them where vLLM's platform is the CPU; they replace."""
    engine_on_cuda: dict[str, Any] = {}
    """The same for a GPU."""

    @property
    def paged(self) -> bool:
        """Whether the pager is to page this engine's experts."""
        return "expert_cache" in self.engine.get("additional_config", {})


class Answer(msgspec.Struct, frozen=True):
    """What came out for one prompt, greedy."""

    tokens: list[int]
    logprobs: Logprobs
    prompt_logprobs: Logprobs


class Result(msgspec.Struct, frozen=True, tag=True):
    """What one engine was and what it answered."""

    answers: list[Answer]
    device: str
    """vLLM's platform: cpu, cuda."""
    dtype: str
    """What it computed in; vLLM does not always take the checkpoint's."""
    layers: list[LayerShape]
    """The paged ones: all that have experts, or none in a stock engine."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A `VvllmError` on its way to the parent."""

    error: str
    sentence: str
    hint: str


def set_environment() -> None:
    """What must stand before vllm is imported: the engine in this process, and what all engines of ours have."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    set_common_environment(os.environ)


def run(job: Job) -> Result:
    """Start the engine in this process, ask it everything, drop it.

    Raises:
        VvllmError: what the pager refuses.
        UnsupportedError: offload without a GPU, or a layer with experts that is not paged in a paged engine.
    """
    set_environment()
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device == "cpu" and job.engine.get("cpu_offload_gb"):
        raise UnsupportedError(
            "The reference offload needs a GPU: vLLM's own offload moves weights between GPU and host.",
            "Use --reference stock or self.",
        )
    from vllm import LLM, SamplingParams

    arguments = kernel_options(Path(job.model)) | job.engine
    arguments |= job.engine_on_cpu if device == "cpu" else job.engine_on_cuda
    if job.paged:
        arguments |= {"worker_extension_cls": WORKER_EXTENSION}
    llm = LLM(model=job.model, **arguments)
    layers = _paged_layers(llm, job.model) if job.paged else []
    sampling = SamplingParams(
        temperature=0, max_tokens=job.max_tokens, ignore_eos=True, logprobs=5, prompt_logprobs=1
    )
    answers = []
    for batch in job.batches:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        answers += [_answer(output) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    return Result(answers, device, str(llm.model_config.dtype).removeprefix("torch."), layers)


def _paged_layers(llm: Any, model: str) -> list[LayerShape]:
    """All layers with experts. vLLM only logs a plugin that fails to load, and stock would then equal stock."""
    report = llm.collective_rpc("pager_report")[0]
    if report["unpaged"]:
        raise UnsupportedError(
            f"{len(report['unpaged'])} MoE layers of {model} are not paged, "
            f"the first is {report['unpaged'][0]}: a comparison would say nothing.",
            "If VLLM_PLUGINS is set, unset it or add vvllm_pager to it; else please report the model.",
        )
    if not report["layers"]:
        raise UnsupportedError(
            f"No layer of {model} is paged: a comparison would say nothing.",
            "vLLM builds none of its layers as one with experts; please report the model.",
        )
    return msgspec.convert(report["layers"], list[LayerShape])


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        list(completion.token_ids),
        _plain(completion.logprobs or []),
        _plain((output.prompt_logprobs or [])[1:]),
    )


def _plain(positions: list[Any]) -> Logprobs:
    return [{token: entry.logprob for token, entry in position.items()} for position in positions]


def main() -> int:
    """The process's side of `verify.run_engine`."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    outcome: Result | Refusal
    try:
        outcome = run(job)
    except VvllmError as error:
        outcome = Refusal(type(error).__name__, error.sentence, error.hint)
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.msgpack.encode(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
