"""Plans by name: the plan zoo, and those that users and plugins register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanError
from .plan import nearest

Plan = Mapping[str, Any]
PlanSource = Plan | Callable[[nn.Module, DeviceMesh], Plan]

_plans: dict[str, PlanSource] = {}
_plugins_asked = False


def register_plan(name: str, plan: PlanSource) -> None:
    """Give a plan a name, for `parallelize_module(module, mesh, name)`.

    Named plans serve several models and meshes: patterns that match nothing and mesh axes that are not
    there are left out instead of being errors.

    Args:
        name: a name that is not taken.
        plan: the plan, or a function of the module and the mesh that returns it.

    Raises:
        ValueError: the name is taken.
        TypeError: `plan` is neither a mapping nor a function.
    """
    if name in _plans or name == "auto":
        raise ValueError(f"name = {name!r} is taken; registered plans are {sorted(_plans)}")
    if not isinstance(plan, Mapping) and not callable(plan):
        raise TypeError(f"plan must be a mapping or a function (module, mesh) -> mapping, got {type(plan).__name__}")
    _plans[name] = plan


class _Registry:
    """What plugins get."""

    def register(self, name: str, plan: PlanSource) -> None:
        """Add a plan under a name that is not taken yet."""
        register_plan(name, plan)


def find_plan(name: str, module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Return the plan registered as `name`, for this module and mesh.

    Raises:
        PlanError: there is none.
    """
    global _plugins_asked
    from . import zoo  # registers the built-in plans  # noqa: F401

    if not _plugins_asked:
        from .._hooks import register_plans

        register_plans(_Registry())
        _plugins_asked = True  # after the call: a plugin that failed is asked again, and fails again
    if name == "auto":
        raise PlanError(
            'plan = "auto" is made for one module, mesh and batch: call parallelize_module(module, mesh, '
            '"auto", example_inputs=batch), or pass auto_plan(module, mesh, batch)'
        )
    source = _plans.get(name)
    if source is None:
        raise PlanError(f"no plan is registered as {name!r}{nearest(name, _plans)}; there are {sorted(_plans)}")
    return source if isinstance(source, Mapping) else source(module, mesh)
