"""Packages that only some uses need, imported when they are needed."""

import importlib
from types import ModuleType

from moss_runtime.errors import UserError


def require(package: str, purpose: str) -> ModuleType:
    """Imports `package`.

    Args:
        package: its import name, which is also its name in the package index up to `_` and `-`.
        purpose: what needs it, as the subject of the error's sentence.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{purpose} needs the package {package}: pip install {package} ({error})") from error
