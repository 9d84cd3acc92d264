"""The command `moss-tts`."""

import argparse
import importlib
import sys

from moss_runtime.errors import UserError

COMMANDS = {
    "synth": "speak a text",
    "encode": "turn audio into codes",
    "decode": "turn codes into audio",
    "inspect": "show what a checkpoint holds, check it, and say how much memory it needs",
    "init-demo": "write a small checkpoint with random weights, to try the program",
}
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
        Exit code: 0, or 2 after one line on standard error that says what is wrong with the input.
    """
    parser = Parser(prog="moss-tts", description="MOSS-TTS-Local: text to 48 kHz speech.")
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, meaning in COMMANDS.items():
        module = importlib.import_module("moss_runtime.commands." + name.replace("-", "_"))
        subparser = subparsers.add_parser(name, help=meaning, description=meaning.capitalize() + ".")
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except UserError as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
