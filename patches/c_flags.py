"""Ask a flag in C whether all threads share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def is_shared(setter: Callable[[Any], Any], off: Any, probe: Any) -> bool:
    """Whether what one thread sets with `setter`, which returns the value before, another one sees.

    The flag is `off` while nothing is under way; if it is not, somebody is using it, nothing is
    tried, and the answer is True.
    """
    before = setter(off)
    if before != off:
        setter(before)
        return True
    helper = threading.Thread(target=setter, args=(probe,), name="torchcompat-probe")
    helper.start()
    helper.join()
    return bool(setter(off) == probe)
