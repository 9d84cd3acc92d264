"""The subcommands of `moss-tts`. Each module has `add_arguments(parser)` and `run(args)`."""
