"""The command `moss-tts`."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from moss_runtime.errors import UserError

COMMANDS = {
    "synth": "speak a text",
    "encode": "turn audio into codes",
    "decode": "turn codes into audio",
    "inspect": "show what a checkpoint holds, check it, and say how much memory it needs",
    "verify": "run every operation and graph of a checkpoint against the reference on this machine",
    "profile": "show where the time of a stage goes, by kernel, and write a trace",
    "bench-engine": "measure how many clients the engine serves, and how fast",
    "init-demo": "write a small checkpoint with random weights, to try the program",
}
PROGRAM = "moss-tts"
BAD_INPUT = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Argument errors are one line, as all other errors are."""

    def error(self, message: str) -> None:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        arguments: default is the process's own.

    Returns:
        Exit code: 0, or 1 after a `verify` that found a fault, or 2 after one line on standard error that says what is
        wrong with the input, or 130 after an interrupt. A request to terminate cleans up, too, and exits with 128 + its
        number.
    """
    try:
        with _termination_as_exit():
            args = _parser().parse_args(arguments)
            code = args.run(args)
            if sys.stdout is not None:  # None: it was closed before the program began
                sys.stdout.flush()
    except UserError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # What is left in the buffer would fail once more, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _refuse("standard output: closed by its reader")
    except OSError as error:
        return _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a class of its own for a GPU's memory, and none for the host's.
        if type(error) is RuntimeError and "can't allocate memory" not in str(error):
            raise
        return _refuse(f"out of memory: {str(error).rpartition('allocate memory: ')[2]}")
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code or 0


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="MOSS-TTS-Local: text to 48 kHz speech.")
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, meaning in COMMANDS.items():
        module = importlib.import_module("moss_runtime.commands." + name.replace("-", "_"))
        subparser = subparsers.add_parser(name, help=meaning, description=meaning.capitalize() + ".")
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def _refuse(reason: str) -> int:
    print(f"{PROGRAM}: error: {' '.join(reason.split())}", file=sys.stderr)
    return BAD_INPUT


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the program, so that part files are removed; only the main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    # A signal that the caller has switched off (nohup) stays off.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
