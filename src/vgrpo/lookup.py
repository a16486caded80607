"""Finding what a setting names: an object by `module:name`, and the nearest valid word to a wrong one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vgrpo.errors import UserError


def find_object(place: str) -> Any:
    """What `module:name` or `path/to/file.py:name` stands for.

    Raises:
        UserError: there is no such module, file or name, or importing it raised.
    """
    where, name = place.rsplit(":", 1)
    if where.endswith(".py") and not Path(where).is_file():
        raise UserError(f"no file {where}, in which to look for {name!r}")
    try:
        module = load_file(Path(where)) if where.endswith(".py") else load_module(where)
    except ModuleNotFoundError as error:
        raise UserError(f"cannot import {where}: there is no module {error.name!r}") from error
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"cannot import {where!r}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise UserError(f"{where} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)


def nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def load_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's own folder, as `python -m` has it
    return importlib.import_module(name)


def load_file(path: Path) -> Any:
    """The module in `path`, run once per process however many of its functions are rewards."""
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look for it there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
