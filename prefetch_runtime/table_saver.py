"""Keeps the file of what a predictor learns up to date, for engines that are killed as they end."""

import logging
import threading
from pathlib import Path

import numpy as np

from predictors import LearnedPredictor

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two looks at whether anything was learned."""


class TableSaver:
    """Writes the table every now and then, from a thread of its own, and once more when closed.

    The counts go on changing while they are written: a row may be a step younger than another.
    """

    def __init__(self, learned: LearnedPredictor, path: Path, *, every_s: float = EVERY_S) -> None:
        self._learned, self._path, self._every_s = learned, path, every_s
        self._written = learned.counts.copy()
        self._ended = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="expert-cache-table", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and write what is known now. Safe to call twice.

        Raises:
            OSError, NpzError: the file cannot be written.
        """
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            try:
                self._learned.save(self._path)
            except OSError as error:  # on a full disk it names no file
                logger.error(
                    "Expert cache: what the predictor has learned could not be written to %s: %s",
                    self._path,
                    error.strerror,
                )
                raise
            logger.info("Expert cache: what the predictor has learned is in %s", self._path)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            counts = self._learned.counts.copy()
            if np.array_equal(counts, self._written):
                continue
            try:
                self._learned.save(self._path)
            except (OSError, ValueError) as error:
                if not self._has_failed:  # said once; the disk may have room again later
                    logger.warning(
                        "Expert cache: what the predictor has learned could not be written to %s: "
                        "%s; trying again",
                        self._path,
                        error,
                    )
                self._has_failed = True
            else:
                self._written, self._has_failed = counts, False
