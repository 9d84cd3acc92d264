"""Output files that appear complete or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from moss_runtime.errors import UserError


def keep_inputs(output: str | Path, inputs: Iterable[str | Path]) -> None:
    """Raise UserError if an output would replace one of the files that a command reads."""
    for path in inputs:
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
            raise UserError(f"{output}: is an input as well, and would be lost; name another output")


@contextlib.contextmanager
def replacing(path: str | Path, suffix: str) -> Iterator[Path]:
    """Yields a new, empty file beside `path` to write to; it takes the place of `path` when the block ends well.

    When the block raises, the new file is removed and `path` is left as it was.

    Args:
        path: of the file.
        suffix: of files of the format that is written, as in ".wav". `path` must have this one, in any case, or none.

    Raises:
        UserError: `path` cannot be written, or has another suffix; raised on entry where it can be known then.
    """
    if Path(path).suffix.lower() not in ("", suffix):
        raise UserError(f"{path}: would be a {suffix} file; name it so, or without a suffix")
    if os.fspath(path).endswith(os.sep):
        raise UserError(f"{path}: cannot be written (names a directory)")
    try:
        target = Path(os.path.realpath(path))  # a symbolic link stays one: what it points to is replaced
        if target.is_symlink():
            raise UserError(f"{path}: cannot be written (symbolic links in a loop)")
        if target.exists() and not target.is_file():
            raise UserError(f"{path}: cannot be written (not a regular file)")
        partial = target.with_name(f".{secrets.token_hex(8)}.part")
        partial.touch(exist_ok=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
