"""Load the native library once, through cffi in ABI mode, with its declarations.

It needs no compiler at run time, and the GIL is released during every call. The declarations are
made of the header (`tools/declarations.py`); a test compares both with the library's symbols.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

from lightck.errors import LightckError, from_native
from lightck.region import _declarations

ABI = 15
_UNKNOWN = 2**64 - 1

ffi: Any = _declarations.ffi


def library_path() -> str:
    """Return the path of the native library: the one built with the package.

    `$LIGHTCK_NATIVE` names another build (sanitizers, fault injection).
    """
    override = os.environ.get("LIGHTCK_NATIVE")
    if override:
        return override
    spec = importlib.util.find_spec("lightck._native")
    if spec is None or spec.origin is None:
        raise LightckError("lightck._native is not built: reinstall lightck on a machine with gcc")
    return spec.origin


@cache
def library() -> Any:
    """Return the loaded library after checking its ABI version.

    Raises:
        LightckError: the library is missing, or was built for another version of this module.
    """
    path = library_path()
    lib = ffi.dlopen(path)
    found = lib.lck_abi_version()
    if found != ABI:
        raise LightckError(f"{path}: native ABI {found}, expected {ABI}; reinstall lightck")
    return lib


def free_dram_bytes() -> int:
    """Return the bytes of DRAM that can be taken without evicting or swapping; 0 if unknown."""
    found = int(library().lck_memory_available(0))
    return 0 if found == _UNKNOWN else found


def last_error() -> str:
    """Return the text of the calling thread's last native error."""
    text: bytes = ffi.string(library().lck_last_error())
    return text.decode(errors="replace")


def check(code: int, context: str) -> None:
    """Raise the exception that belongs to a native code below 0.

    `context` names region, slot and step, as far as the caller knows them.
    """
    if code < 0:
        raise from_native(code, last_error(), context=context)
