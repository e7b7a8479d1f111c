"""`accelerate launch -m scale_cli` and `python -m scale_cli` run the command line."""

from scale_cli.cli import main

if __name__ == "__main__":
    main()
