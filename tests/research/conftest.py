"""What lies in `registered/` runs in a process whose tables are extended: `test_registered.py` starts it."""

import sys

collect_ignore = [] if "scripts.research.registered" in sys.modules else ["registered"]
