"""`scale` with the methods and recipes of this folder: `python -m scripts.research VERB CONFIG`."""

import scripts.research.registered  # noqa: F401  before the command line imports the config
from scale_cli.cli import main

if __name__ == "__main__":
    main()
