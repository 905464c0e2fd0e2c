"""The pure core of paging, shared by the pager and the replay: page table, victims, waves. No torch, no clock."""

from vvllm_shared.residency.page_table import EMPTY, PageTable, Weights
from vvllm_shared.residency.waves import Plan, Wave, plan_step

__all__ = ["EMPTY", "PageTable", "Plan", "Wave", "Weights", "plan_step"]
