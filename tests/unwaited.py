"""No test waits for a disk: only a cut of power would show what a disk had kept, and no test has one.

The calls are made, counted and made to fail as ever. What they wait, tens of thousands of times, is a minute.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


def let_nothing_wait_for_the_disk() -> None:
    """Make `os.fsync` of this process, and of its forks, return at once."""
    os.fsync = _known


def _known(fd: FileDescriptorLike) -> None:
    os.fstat(fd if isinstance(fd, int) else fd.fileno())  # an error where it is not open, as ever
