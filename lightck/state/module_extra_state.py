"""Capture modules' extra state (`get_extra_state`), which `state_dict` has beside tensors.

It is taken as an extra at forward start: what forwards count or measure, as the scales of quantized
layers, is in no parameter and no buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightck.state.extras import OF_MODULES, Extra
from lightck.state.modules import named_modules

_KEY = "_extra_state"


@dataclass(frozen=True, eq=False)
class ModuleState:
    """A module's extra state, as a stateful object."""

    module: nn.Module

    def state_dict(self) -> Any:
        """Return the module's extra state."""
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        """Set the module's extra state."""
        self.module.set_extra_state(state)


def extra_states(model: nn.Module) -> tuple[Extra, ...]:
    """Make an extra of every module that has extra state, once of each."""
    found: dict[int, Extra] = {}
    for path, module in named_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = f"{OF_MODULES}{path}.{_KEY}" if path else f"{OF_MODULES}{_KEY}"
            found.setdefault(id(module), Extra(name, ModuleState(module), "forward"))
    return tuple(found.values())
