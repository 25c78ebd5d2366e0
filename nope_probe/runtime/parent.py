"""The end of a process after that of the torchrun that started it.

torchrun stops its processes when it is stopped. One that is killed cannot, and its processes would
wait for each other, or compute, for as long as they take.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from nope_probe.errors import exit_code_of

EVERY = 1.0  # seconds between two looks
# A process that waits for another one cannot act on a signal; it is ended after so many seconds.
GRACE = 20.0


def end_with_torchrun() -> None:
    """Watch the torchrun that started this process, if one did, and end soon after it.

    The process gets SIGTERM first, on which a run saves its progress.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(EVERY)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(exit_code_of(signal.SIGTERM))
