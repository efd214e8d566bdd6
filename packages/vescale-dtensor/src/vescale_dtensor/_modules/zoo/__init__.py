"""Plans for well-known models, one module per family. Importing this package registers them.

`"hf"` is the plan that fits `model.config.model_type`, for models of transformers.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlanError
from ..plan import nearest
from ..registry import Plan, PlanSource, register_plan
from .bert import bert
from .data import data
from .gpt2 import gpt2
from .llama import llama
from .mixtral import mixtral
from .nanogpt import nanogpt
from .t5 import t5
from .transformer import transformer
from .vit import vit

PLANS: dict[str, PlanSource] = {
    "bert": bert,
    "data": data,
    "gemma": llama,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "nanogpt": nanogpt,
    "qwen2": llama,
    "qwen3": llama,
    "t5": t5,
    "transformer": transformer,
    "vit": vit,
}
"""The zoo. Those of transformers are called as its models are in `config.model_type`."""


def hf(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """The plan of the zoo for a model of transformers, by `module.config.model_type`."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    source = PLANS.get(kind) if isinstance(kind, str) else None
    if source is None:
        raise PlanError(
            f'the plan "hf" knows no models of type {kind!r}{nearest(str(kind), PLANS)}; it goes by '
            f"module.config.model_type and knows {sorted(PLANS)}. Give a plan of your own, or the name of one"
        )
    assert callable(source)
    return source(module, mesh)


for _name, _plan in PLANS.items():
    register_plan(_name, _plan)
register_plan("hf", hf)
