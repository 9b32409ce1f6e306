"""The frozen `Config`: where its values may come from, and what each may be.

Precedence: argument, environment (`LIGHTCK_<FIELD>`), file or given `Config`, default.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import signal
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lightck.errors import ConfigError
from lightck.keywords import near
from lightck.policy import Auto, Keep, parse
from lightck.policy.keep import parse_keep
from lightck.types import Failure, Policy

_log = logging.getLogger(__name__)
_ENV_PREFIX = "LIGHTCK_"
_DEFAULT_PATH = "lightck-run"  # in the working directory


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a handle; checked when made, never changed after.

    Attributes:
        path: folder of the run, a devdax device or a libpmemobj pool; `~` is expanded, and it is
            made absolute at once.
        policy: which steps are due: `auto` (as often as measured costs and seen failures ask for,
            for 1 % of the time at most), an int (every that many steps), other words, or a table.
        slots: whole snapshots the region has room for, 2 to 16; 0 is 2, with several ranks 4: one
            that counts, one whose global outcome is not known yet, one to write, and one for a
            failure (without `failure`: 3). It does not change for a region that is there already.
        threads: copying threads, 1 to 64; 0 is one for each CPU that the process may use when it
            attaches, 4 at most.
        chunk_bytes: bytes of one piece of a copy, a multiple of 4096, at most 1 GiB.
        priority: priority of the copying threads. `idle`: they share the process's CPUs out among
            themselves and run only when nothing else wants them (SCHED_IDLE). What is not copied by
            then is copied at the fence; while other processes keep the CPUs busy, all is copied by
            threads of the training's priority. `normal`: always by such threads, on any CPU.
        schedule: when copies run: `eager` (all at once when a snapshot opens), `backward` (paced by
            the gradient hooks), `comm` (with data parallel: while gradients are communicated, at
            full speed once the training thread only waits for them), or `auto` (`comm`
            where attach sees data parallel, else `eager`; a state so small that waking workers
            would take longer is copied by the training thread at forward start).
        placement: `direct` (tensor to region), `staged` (through as much DRAM as the state has, to
            the region in the background: for media slower than a step), or `auto` (chosen
            at attach: `staged` where a measurement finds the medium less than half as fast as
            DRAM, or `write_limit` is; else `direct`). Ordinary files are always staged.
            For tensors in a GPU's memory: `direct` (into the region, registered with the driver),
            `host` or `staged` (through a bounded ring of pinned DRAM), `device` (a copy in the
            GPU's spare memory first), `auto` (what is possible, in the order `device`, `direct`,
            `host`); what is not possible becomes `host`, as `stats()` says. `auto` and `device`
            take the ring where the first snapshot measures that the GPU stores less than half as
            fast into the region. `host` and `device` are `auto` for tensors in DRAM.
        write_limit: bytes per second written to the medium at most, for media that others use,
            too; writes may be 8 ms ahead of it. 0 is no limit.
        backend: what maps the region for the writer: `auto` (lightck itself; libpmemobj where the
            region is in a pool) or `pmemobj` (a region in a libpmemobj pool: one per rank in the
            folder `path`, or the pool `path`). Readers find out by themselves.
        durability: `medium` (what the medium offers) or `process` (an ordinary file without
            syncs: survives the process, not the host).
        numa_node: node whose memory holds the region (CXL memory is one); None leaves it open.
        on_error: what a fault in the background does: `warn`, `raise` (at the next call of the
            engine), or a function that is called with the exception.
        overwrite: allow `attach` to a path with snapshots that were not restored.
        proof: compare every byte with the live tensors at the fence, not a random sample.
        run_id: name of the run, kept in its snapshots; `$TORCHELASTIC_RUN_ID` when there is one.
        close_timeout_s: seconds after which `close()` logs a warning that it still waits. It always
            finishes open snapshots, so it may take as long as the medium's sync.
        trace: record what every thread does in the last steps: a file that `close()` writes (for
            https://ui.perfetto.dev and `lightck timeline`), or true, for `handle.trace(file)`. With
            several ranks each has a file of its own: of `run.json`, `run.rank1.json`.
        failure: `jit`: the last complete step is saved when the training fails (see `Failure`,
            which may be given instead; in a file as a table), so that a minibatch is lost at most.
            `off`: signals are left alone, and no boundary state is noted between snapshots.
            A save between a step's end and the next forward is early: restore prefers an exact one
            of the step before; else the loop makes up for it (`RestoreInfo.early`).
        keep: which snapshots the history keeps beyond the slots: so many of the newest, words
            (`newest 3 or best val_loss`) or a policy of `lightck.policy`; None, or 0: no history.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
    """

    path: Path = Path(_DEFAULT_PATH)
    policy: Policy = Auto()
    slots: int = 0
    threads: int = 0
    chunk_bytes: int = 262_144
    priority: Literal["idle", "normal"] = "idle"
    schedule: Literal["auto", "eager", "backward", "comm"] = "auto"
    placement: Literal["auto", "direct", "staged", "host", "device"] = "auto"
    write_limit: int = 0
    backend: Literal["auto", "pmemobj"] = "auto"
    durability: Literal["medium", "process"] = "medium"
    numa_node: int | None = None
    on_error: Literal["warn", "raise"] | Callable[[BaseException], object] = "warn"
    overwrite: bool = False
    proof: bool = False
    run_id: str = field(default_factory=lambda: os.environ.get("TORCHELASTIC_RUN_ID") or "default")
    close_timeout_s: float = 60.0
    trace: bool | Path = False
    failure: Literal["jit", "off"] | Failure = "jit"
    """`"jit"` is taken for `Failure()`."""
    keep: int | str | Keep | None = None
    """A `Keep`, or None, once the config is made."""

    def __post_init__(self) -> None:
        for name in _CHECKS:
            value = _checked(name, getattr(self, name), "Config")
            object.__setattr__(self, name, value)

    @classmethod
    def resolve(cls, config: Config | str | Path | None = None, **settings: Any) -> Config:
        """Put a config together from all its sources.

        Args:
            config: a `Config`; the path of a TOML file; or the name of a preset: `dram`,
                `pmem-fsdax`, `pmem-devdax`, `cxl-numa`, `disk`. A string is a path when it ends in
                `.toml` or contains a `/`.
            **settings: fields that take precedence over everything; None means not given.

        Returns:
            The checked config.

        Raises:
            ConfigError: an unknown key, a wrong type or an impossible value, with the key, the
                value, the file or variable it comes from and what is allowed; or the file cannot
                be read.
        """
        found = _from_config(config) | _from_environment()
        found |= {k: (v, "argument") for k, v in settings.items() if v is not None}
        return cls(**{name: _checked(name, *source) for name, source in found.items()})


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in their order."""
    return tuple(_CHECKS)


_Found = dict[str, tuple[object, str]]  # field -> value and where it comes from


def _from_config(config: Config | str | Path | None) -> _Found:
    if config is None:
        return {}
    if isinstance(config, Config):
        return {f.name: (getattr(config, f.name), "Config") for f in fields(config)}
    if not isinstance(config, str | Path):
        raise ConfigError(f"config = {config!r}: must be a Config, a TOML file or a preset's name")
    file = _file_of(config)
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config = {str(config)!r}: cannot read {file}: {error}") from error
    except ValueError as error:  # the base of TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(f"config = {str(config)!r}: {file} is not TOML: {error}") from error
    return {key: (value, f"file {file}") for key, value in table.items()}


def _file_of(config: str | Path) -> Path:
    if isinstance(config, Path) or "/" in config or config.endswith(".toml"):
        return Path(config).expanduser()
    # In an installed wheel the presets are in the package's folder, in a checkout beside it.
    here = Path(__file__).parent
    folder = next((d for d in (here / "configs", here.parent / "configs") if d.is_dir()), here)
    presets = sorted(file.stem for file in folder.glob("*.toml"))
    if config not in presets:
        raise ConfigError(
            f"config = {config!r}: no such preset; must be one of {', '.join(presets)}, "
            "or the path of a file (ending in .toml, or with a /)"
        )
    return folder / f"{config}.toml"


def _from_environment() -> _Found:
    found: _Found = {}
    for name in _CHECKS:
        variable = _ENV_PREFIX + name.upper()
        text = os.environ.get(variable, "")
        if text:
            found[name] = (_decoded(name, text), f"environment variable {variable}")
    for variable in sorted(os.environ):
        # Only near misses are refused: others with the prefix may belong to another lightck tool.
        name = variable.removeprefix(_ENV_PREFIX).lower()
        if variable.startswith(_ENV_PREFIX) and name not in _CHECKS:
            close = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.8)
            if close:
                meant = _ENV_PREFIX + close[0].upper()
                _log.warning("environment variable %s has no effect; %s?", variable, meant)
    return found


def _decoded(name: str, text: str) -> object:
    """Turn an environment variable's text into a value; text that is no TOML value stays text."""
    if name in _TEXTS:
        return text
    if name in ("overwrite", "proof", "trace"):
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _checked(name: str, value: object, origin: str) -> Any:
    check = _CHECKS.get(name)
    if check is None:
        meant = near(name, _CHECKS)
        hint = f"did you mean {meant}? " if meant else ""
        known = ", ".join(_CHECKS)
        raise ConfigError(
            f"unknown setting {name} = {value!r} ({origin}); {hint}settings are {known}"
        )
    try:
        return check(value)
    except ValueError as error:  # ConfigError, which the policies raise, is one
        raise ConfigError(f"{name} = {value!r} ({origin}): {error}") from None


# ---- What each value may be: a check returns the value to keep, or raises with what is allowed.


def _integer(low: int, high: int, multiple: int = 1) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            if low <= value <= high and value % multiple == 0:
                return value
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"must be an integer from {low} to {high}{of}")

    return check


def _slots(value: object) -> int:
    return 0 if value == 0 and type(value) is int else _integer(2, 16)(value)


def _choice(*allowed: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, str) and value in allowed:
            return value
        raise ValueError(f"must be one of {', '.join(map(repr, allowed))}")

    return check


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ValueError("must be a finite number of seconds, 0 or more")


# A Path has merged two slashes into one; a single letter may be a folder's name.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def _path(value: object) -> Path:
    if isinstance(value, str | os.PathLike) and str(value):
        address = _ADDRESS.match(str(value))
        if address is None:  # the working directory may change later
            return Path(os.path.abspath(Path(value).expanduser()))
        if address[1] == "file":
            raise ValueError(
                f"must be a path, not a URL: write {'/' + str(value)[5:].lstrip('/')!r}"
            )
        raise ValueError(
            "must be the path of a folder, a pool or a device of this machine, not a URL: write"
            f" 'run', say, and bring snapshots to {address[0]}... with `lightck export`"
        )
    raise ValueError("must be the path of a folder, a pool or a device")


def _trace(value: object) -> bool | Path:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike) and str(value):
        return Path(os.path.abspath(Path(value).expanduser()))
    raise ValueError("must be true, false or the path of a file")


def _text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("must be a text that is not empty")


def _node(value: object) -> int | None:
    return None if value is None else _integer(0, 1023)(value)


def _error_action(value: object) -> object:
    if callable(value) or value in ("warn", "raise"):
        return value
    raise ValueError("must be 'warn', 'raise' or a function of one exception")


def _failure(value: object) -> object:
    if value in ("jit", "off"):
        return Failure() if value == "jit" else value
    if isinstance(value, dict):
        unknown = value.keys() - _FAILURE_CHECKS.keys()
        if unknown:
            raise ValueError(f"has no {', '.join(sorted(unknown))}; {', '.join(_FAILURE_CHECKS)}")
        value = Failure(**value)
    if not isinstance(value, Failure):
        raise ValueError("must be 'jit', 'off' or lightck.Failure(...)")
    checked = {}
    for name, check in _FAILURE_CHECKS.items():
        try:
            checked[name] = check(getattr(value, name))
        except ValueError as error:
            raise ValueError(f"{name} = {getattr(value, name)!r} {error}") from None
    return Failure(**checked)


def _signals(value: object) -> tuple[str, ...]:
    names = {each.name for each in signal.Signals} - _NOT_HANDLED
    if isinstance(value, list | tuple) and names.issuperset(value):
        return tuple(value)
    raise ValueError(
        "must be names of signals, such as 'SIGTERM', that can be handled; not of faults of the"
        " code itself"
    )


def _notice(value: object) -> object:
    return value if value is None or callable(value) else _path(value)


def _at_will(value: object) -> object:
    if value is None or callable(value):
        return value
    raise ValueError("must be a function")


_NOT_HANDLED = {"SIGKILL", "SIGSTOP"} | {
    # After their handler the instruction runs again: Python's own handler never runs.
    *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS")
}
_FAILURE_CHECKS: dict[str, Callable[[object], Any]] = {
    "signals": _signals,
    "notice": _notice,
    "grace_s": _seconds,
    "hang_steps": _seconds,
    "hang_s": _seconds,
    "hang_exit_s": lambda value: None if value is None else _seconds(value),
    "on_failure": _at_will,
}
_TEXTS = "path priority schedule placement backend durability on_error run_id".split()
_CHECKS: dict[str, Callable[[object], object]] = {
    "path": _path,
    "policy": parse,
    "slots": _slots,
    "threads": _integer(0, 64),
    "chunk_bytes": _integer(4096, 1 << 30, multiple=4096),
    "priority": _choice("idle", "normal"),
    "schedule": _choice("auto", "eager", "backward", "comm"),
    "placement": _choice("auto", "direct", "staged", "host", "device"),
    "write_limit": _integer(0, 1 << 50),
    "backend": _choice("auto", "pmemobj"),
    "durability": _choice("medium", "process"),
    "numa_node": _node,
    "on_error": _error_action,
    "overwrite": _boolean,
    "proof": _boolean,
    "run_id": _text,
    "close_timeout_s": _seconds,
    "trace": _trace,
    "failure": _failure,
    "keep": parse_keep,
}
