"""Check the arguments of `attach` and `restore`; an error says what to write instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightck.config import Config, setting_names
from lightck.errors import ConfigError
from lightck.keywords import near
from lightck.state.extras import At

_POSITIONS = ("model", "optimizer", "path")
_OF_ATTACH = (*_POSITIONS, "policy", "extras", "boundary", "on_event", "config")


def check(
    call: str,
    model: object,
    optimizer: object,
    path: object,
    extras: object,
    more: Sequence[object] = (),
    on_event: object = None,
    **others: object,
) -> tuple[nn.Module, list[Optimizer]]:
    """Return the model as one module, and the optimizers as a list, once all arguments are right.

    Args:
        call: `attach` or `restore`, for messages.
        model: as the caller gave it; so are the others.
        optimizer: an optimizer, several, or None.
        path: where snapshots are kept.
        extras: the user's own state, by name.
        more: arguments given by position beyond the path, which are refused.
        on_event: the function that hears of events, or None.
        **others: further arguments that are an optimizer or None.

    Raises:
        ConfigError: an argument is wrong; says what was expected, what was found and what to write.
    """
    module, optimizers = _as_module(call, model, optimizer), _as_optimizers(call, optimizer)
    if more:
        raise ConfigError(
            f"{call} takes {', '.join(_POSITIONS)} by position, found {_described(more[0])} as"
            f" well: write {_by_name(call, more[0])}"
        )
    if isinstance(path, Optimizer | nn.Module | Mapping | Config | int):
        write = _by_name(call, path)
        raise _wrong(call, "path", "the path of a folder, a pool or a device", path, write)
    if extras is not None and not isinstance(extras, Mapping):
        raise _wrong(
            *(call, "extras", "a dict of names and objects", extras, _named(extras)),
            "a snapshot keeps each under its name",
        )
    if on_event is not None and not callable(on_event):
        raise _wrong(call, "on_event", "a function", on_event, "on_event=print, for example")
    for name, value in others.items():
        if value is not None and not isinstance(value, Optimizer):
            raise _wrong(call, name, "a torch.optim.Optimizer", value, f"{name}=optimizer")
    return module, optimizers


def _as_module(call: str, model: object, optimizer: object) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Iterable) and not isinstance(model, str | os.PathLike | Mapping):
        modules = list(model)
        if modules and all(isinstance(each, nn.Module) for each in modules):
            return nn.ModuleList(modules)
        model = next((each for each in modules if not isinstance(each, nn.Module)), model)
    write, why = f"{call}(model, ...)", ""
    if isinstance(model, Optimizer):
        swapped = isinstance(optimizer, nn.Module)
        write, why = f"{call}(model, optimizer, ...)", "the two are swapped" if swapped else ""
    elif isinstance(model, Mapping) or hasattr(model, "requires_grad"):
        why = "lightck takes the state from the module itself, and puts it back into it"
    elif isinstance(model, str | os.PathLike):
        write = f"{call}(model, optimizer, path={os.fspath(model)!r})"
    elif isinstance(model, type):
        write = f"{call}({model.__name__}(...), ...)"
    raise _wrong(call, "model", "a torch.nn.Module or a list of some", model, write, why)


def _as_optimizers(call: str, optimizer: object) -> list[Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer):
        return [unwrapped(optimizer)]
    if isinstance(optimizer, Iterable) and not isinstance(
        optimizer, str | os.PathLike | Mapping | nn.Module
    ):
        several = list(optimizer)
        if all(isinstance(each, Optimizer) for each in several):
            found = [unwrapped(each) for each in several]
            if len({id(each) for each in found}) < len(found):
                raise ConfigError(f"{call}: an optimizer is given twice: give each once")
            return found
        optimizer = next(each for each in several if not isinstance(each, Optimizer))
    write, why = f"{call}(model, optimizer, ...)", ""
    if isinstance(optimizer, str | os.PathLike):
        write = f"{call}(model, path={os.fspath(optimizer)!r})"
        why = "the second position is the optimizer's"
    elif isinstance(optimizer, nn.Module):
        write = f"{call}([model_a, model_b], ...)"
        why = "several modules are given as one list"
    elif isinstance(optimizer, Mapping):
        why = "the optimizer itself, not its state_dict; other state is given as extras={...}"
    elif isinstance(optimizer, LRScheduler | int | Config):
        write = f"{call}(model, optimizer, {_by_name(call, optimizer)})"
    elif isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        write = f"{call}(model, wrapper.optimizer, ...)"
        why = "the optimizer that it wraps"
    raise _wrong(
        call, "optimizer", "a torch.optim.Optimizer or a list of some", optimizer, write, why
    )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps: the one inside of Accelerate's, any other as it is."""
    if type(optimizer).__module__ == "accelerate.optimizer":
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner
    return optimizer


def refuse_unknown(call: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse keywords that `call` does not have.

    Raises:
        ConfigError: there is one; names it, its value, which one may be meant, and all there are.
    """
    for name in sorted(given.keys() - known):
        value = given[name]
        meant = near(name, (*known, *setting_names(), *_OF_ATTACH))
        if meant is None:
            hint = ""
        elif meant in known:
            hint = f"did you mean {meant}? "
        else:
            hint = f"{meant} is an argument of attach; "
        raise ConfigError(
            f"{call}: unknown argument {name} = {_described(value)}; {hint}arguments are"
            f" {', '.join(known)}"
        )


def _by_name(call: str, value: object) -> str:
    """Show how to pass a value by name that came in the place of another argument."""
    if isinstance(value, Config):
        return "config=config"
    if isinstance(value, int) and call == "attach":
        return f"policy={value!r}"
    if isinstance(value, Mapping) or (
        hasattr(value, "state_dict") and not isinstance(value, nn.Module | Optimizer)
    ):
        return _named(value)
    return f"{call}(model, optimizer, path='run', name=value, ...)"


def _named(value: object) -> str:
    """Show how to pass the objects as `extras`."""
    subject = value.subject if isinstance(value, At) else value
    if isinstance(subject, Mapping):
        return "extras={...}"
    several = list(subject) if isinstance(subject, list | tuple) else [subject]
    names = [
        f"{type(each).__name__.lower()!r}: ..." for each in several if hasattr(each, "state_dict")
    ]
    return f"extras={{{', '.join(names) or repr('name') + ': object'}}}"


def _wrong(
    call: str, name: str, expected: str, found: object, write: str, why: str = ""
) -> ConfigError:
    return ConfigError(
        f"{call}: {name} must be {expected}, found {_described(found)}: write {write}"
        + (f" ({why})" if why else "")
    )


def _described(value: Any) -> str:
    """Describe a value for a message: by its text where that is short, else by its type."""
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"
