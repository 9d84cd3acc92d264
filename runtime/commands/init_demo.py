"""`moss-tts init-demo`: write the demo checkpoint."""

import argparse

from moss_runtime.demo_checkpoint import write_demo_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="new or empty directory, or an older demo checkpoint")


def run(args: argparse.Namespace) -> None:
    write_demo_checkpoint(args.directory)
    print(f"Wrote a demo checkpoint to {args.directory}. Its weights are random: its speech is noise.")
