"""Spares Triton's interpreter what it finds out anew at every call of a kernel.

It goes through all names of `triton.language` for each call, also of a function that a kernel
calls, to put its own operations in their place, and builds a table for every type that it looks
up: together two fifths of the time of a kernel's test. What it computes stays the same.
"""

import inspect
from types import ModuleType
from typing import Any

import numpy as np


def quicken(interpreter: ModuleType) -> None:
    """Change `triton.runtime.interpreter`, once; a version without these parts is left as it is."""
    patch_builtin = getattr(interpreter, "_patch_builtin", None)
    np_dtype_of = getattr(interpreter, "_get_np_dtype", None)
    if hasattr(interpreter, "_is_quick") or patch_builtin is None or np_dtype_of is None:
        return
    vars(interpreter)["_is_quick"] = True
    is_builtin = interpreter.tl.core.is_builtin
    builtins: dict[Any, list[str]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:  # the first call is made outside of any kernel
            members = inspect.getmembers(package)
            builtins[package] = [name for name, member in members if is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not so where a kernel that runs has put it there
                interpreter._patch_attr(package, name, member, builder, scope)

    np_types: dict[str, np.dtype[Any]] = {}

    def np_dtype(kind: Any) -> np.dtype[Any]:
        element = kind.scalar
        if isinstance(element, interpreter.tl.pointer_type):
            return np.dtype(np.uint64)
        if element.name not in np_types:
            np_types[element.name] = np_dtype_of(element)
        return np_types[element.name]

    vars(interpreter).update(_patch_builtin=patch, _get_np_dtype=np_dtype)
