"""`scale`, `accelerate launch -m scale_cli` and `python -m scale_cli` run the command line."""

import signal


def main() -> None:
    """Run the command line; a Ctrl-C while it is imported ends it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scale_cli.cli import main

    main()


if __name__ == "__main__":
    main()
