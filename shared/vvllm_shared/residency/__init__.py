"""The pure core of paging, shared by the pager and the replay: page table, victims, waves. No torch, no clock."""

from vvllm_shared.residency.page_table import EMPTY, PageTable, Weights
from vvllm_shared.residency.waves import Plan, Wave, graph_sizes, most_tokens, plan_step

__all__ = ["EMPTY", "PageTable", "Plan", "Wave", "Weights", "graph_sizes", "most_tokens", "plan_step"]
