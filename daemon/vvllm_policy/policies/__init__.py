"""The policies by name."""

from vvllm_policy.policies.base import LayerAdvice, Policy
from vvllm_policy.policies.layer import Layer
from vvllm_policy.policies.lfru import Lfru

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Layer, Lfru)}

__all__ = ["POLICIES", "LayerAdvice", "Policy"]
