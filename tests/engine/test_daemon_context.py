"""The default context is 32,768 tokens or what fits, and what fits is vLLM's own measure."""

from __future__ import annotations

import pytest

from daemon_helpers import daemon
from zoo import ZooModel

pytestmark = pytest.mark.engine


def test_the_context_shrinks_to_what_the_kv_cache_holds(
    tmp_path_factory: pytest.TempPathFactory, zoo_model: ZooModel
) -> None:
    """32,768 positions in the config; a cache of 1 MiB holds fewer."""
    options = ("--engine", "kv_cache_memory_bytes=1048576", "--engine", "block_size=32")
    with daemon(tmp_path_factory.mktemp("c") / "run", zoo_model("qwen3_moe"), *options) as running:
        running.wait_until_ready()
        (model,) = running.request("GET", "/v1/models").json["data"]
        assert 256 <= model["max_model_len"] < 32768
        reply = running.complete("word " * model["max_model_len"], 4)
        assert reply.status == 400
        assert str(model["max_model_len"]) in reply.json["error"]["message"]
        assert running.complete("a short one", 4).status == 200
