"""One thread that writes what people read later (logs and samples of runs), so that the loop never waits for a disk.

Used by `journal` and `samples`. Nothing here may fail or delay a run: writes that fail are logged once a
minute, and when the disk cannot keep up the newest writes are left out, so that what waits stays small.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_MOST_WAITING = 512
_MOST_BULKY_WAITING = 64
"""Of these, jobs that hold a megabyte or so."""
_SECONDS_BETWEEN_COMPLAINTS = 60.0

Job = Callable[[], None]


class BackgroundWriter:
    """Runs small file jobs in order on a daemon thread, which starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job] = queue.Queue(_MOST_WAITING)
        self._bulky = threading.BoundedSemaphore(_MOST_BULKY_WAITING)
        self._thread: threading.Thread | None = None
        self._told = -math.inf

    def submit(self, job: Job, *, bulky: bool = False) -> None:
        """Run the job later; call from the event loop's thread only.

        Args:
            job: what to do; whatever it refers to is kept until then.
            bulky: it refers to more than a line of text.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="background-writer", daemon=True)
            self._thread.start()
        if bulky and not self._bulky.acquire(blocking=False):
            self._trouble("the disk is too slow")
            return
        try:
            self._jobs.put_nowait(self._releasing(job) if bulky else job)
        except queue.Full:
            if bulky:
                self._bulky.release()
            self._trouble("the disk is too slow")

    def _releasing(self, job: Job) -> Job:
        def run() -> None:
            try:
                job()
            finally:
                self._bulky.release()

        return run

    def flush(self, seconds: float) -> bool:
        """Wait until everything submitted so far is done. False when it took longer."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except OSError as error:
                self._trouble(str(error))
            except Exception:  # the border of this thread: a bad job must not end the others
                log.exception("a run's log or samples could not be written")

    def _trouble(self, why: str) -> None:
        if time.monotonic() - self._told > _SECONDS_BETWEEN_COMPLAINTS:
            self._told = time.monotonic()
            log.error("logs and samples of runs are not written until this is mended: %s", why)
