"""The rows of a measurement: made from what a case left, kept as they come, found again."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from prefetch_runtime.bench.cases import Case
from prefetch_runtime.bench.config import BASELINES
from prefetch_runtime.config import ConfigError

Row = dict[str, Any]

ROWS_FILE = "rows.jsonl"
KEPT = ("ok", "failed", "timeout", "refused")
"""Statuses that the next run does not try again (unless it is told to)."""


def key_of(spec: Mapping[str, Any], batch: int, digests: Mapping[str, str]) -> str:
    """Names one measurement: equal for equal work, whatever it is called and wherever it lies."""
    work = {name: value for name, value in spec.items() if name != "batches"}
    work["llm"] = {**spec["llm"], "model": digests["model"]}
    work["routing"] = digests["routing"]
    text = json.dumps([work, batch], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RowStore:
    """Rows in `folder`/rows.jsonl, a line each; the last of a key counts.

    A disk that is full does not end a measurement: the row stays in memory, and `failure` says so.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        fresh: bool = False,
        any_code: bool = False,
    ) -> None:
        """`any_code`: rows that other code of this project measured on this machine count, too.

        Raises:
            ConfigError: the folder cannot be written, or another bench writes into it.
        """
        self.failure: str | None = None
        self.ignored = 0
        """Rows of another machine or other code, which are left alone."""
        self._identity = dict(identity)
        self._compared = [name for name in identity if name != "code" or not any_code]
        self._rows: dict[str, Row] = {}
        path = folder / ROWS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a+", encoding="utf-8", errors="replace")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"another bench is writing into {folder}; wait for it, or choose another --out"
            ) from None
        except OSError as error:
            raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from None
        if fresh:  # only now that no other bench needs them
            self._file.truncate(0)
        self._read()

    def _read(self) -> None:
        self._file.seek(0)
        line = "\n"
        for line in self._file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None  # half a line: the disk was full, or the machine went away
            if not isinstance(row, dict) or not isinstance(row.get("key"), str):
                continue
            measured = row.get("identity")
            if isinstance(measured, dict) and all(
                measured.get(name) == self._identity[name] for name in self._compared
            ):
                self._rows[row["key"]] = row
            else:
                self.ignored += 1
        if not line.endswith("\n"):
            self._file.write("\n")  # or the next row would be the rest of that line

    def find(self, key: str, *, retry: bool = False) -> Row | None:
        """A row that need not be measured again."""
        row = self._rows.get(key)
        kept = ("ok",) if retry else KEPT
        return row if row is not None and row.get("status") in kept else None

    def add(self, row: Row) -> Row:
        """Keep a row, on disk before anything else happens; returns it as it is kept."""
        row = {**row, "identity": self._identity, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
        self._rows[row["key"]] = row
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.failure = f"{ROWS_FILE} could not be written: {error.strerror}"
        return row

    def close(self) -> None:
        """Let the next bench in."""
        with suppress(OSError):
            self._file.close()


def measured_row(
    loaded: Mapping[str, Any], batch: Mapping[str, Any], *, is_cache: bool
) -> dict[str, Any]:
    """What a case's events say of one batch, in the units of the table."""
    seconds, steps = batch["decode_s"], batch["steps"]
    row = {
        name: batch[name]
        for name in (
            "repeats",
            "steps",
            "ttft_ms",
            "tpot_ms",
            "step_ms",
            "step_mean_ms",
            "tokens_per_s",
        )
    }
    row |= {
        "load_s": loaded["load_s"],
        "peak_gib": batch["peak_bytes"] / 2**30,
        "device_gib": batch["device_bytes"] / 2**30,
    }
    if is_cache:
        demanded = batch["hits"] + batch["late"] + batch["misses"]
        copied = batch["bytes_copied"] + batch["bytes_prefetched"]
        row |= {
            "mode": loaded["mode"],
            "hit_rate": batch["hits"] / demanded if demanded else None,
            "demand_bytes_per_step": batch["bytes_copied"] / steps,
            "prefetch_bytes_per_step": batch["bytes_prefetched"] / steps,
            "useful_bytes_per_step": batch["bytes_useful"] / steps,
            "wasted_bytes_per_step": batch["bytes_wasted"] / steps,
            "link_gbs": copied / seconds / 1e9,
            "host_calls_per_step": batch["host_calls"] / steps,
            "waves": batch["waves"],
            "stall_ms": batch["stall_seconds"] / steps * 1e3,
            "expert_gib": (loaded["slot_bytes"] + loaded["staging_bytes"]) / 2**30,
            "pinned_gib": loaded["pinned_bytes"] / 2**30,
            "host_gib": loaded["host_bytes"] / 2**30,
        }
        return row
    streamed = loaded["streamed_bytes"]
    row |= {
        "expert_gib": loaded["device_expert_bytes"] / 2**30,
        "pinned_gib": loaded["offloaded_bytes"] / 2**30,
    }
    if streamed:  # every step brings all of it; what uva's kernels read is not known
        row["link_gbs"] = streamed * steps / seconds / 1e9
    return row


def with_parts(rows: Sequence[Row], link_gbs: float | None) -> list[Row]:
    """Rows with their step cut into compute, stall and overhead, where a resident run allows it.

    compute: the step of the resident engine of the same kind (graphs or eager) at the same batch,
    but no more than the stall leaves of this step;
    stall: the runtime's own counter of the time that compute waited for demanded experts;
    overhead: what is left, at least 0. limit: the larger of compute and the missed bytes over the
    link, which perfect prefetching would reach.
    """
    resident = {
        (row["graphs"], row["batch"]): row["step_ms"]
        for row in rows
        if row["status"] == "ok" and row["engine"] in ("resident", "resident-eager")
    }
    made = []
    for row in rows:
        row = dict(row)
        made.append(row)
        compute = resident.get((row.get("graphs"), row["batch"]))
        if row["status"] != "ok" or compute is None or row["engine"].startswith("resident"):
            continue
        row["resident_ms"] = compute
        row["compute_ms"] = min(compute, max(0.0, row["step_ms"] - row.get("stall_ms", 0.0)))
        if "stall_ms" in row:
            row["overhead_ms"] = max(0.0, row["step_ms"] - row["compute_ms"] - row["stall_ms"])
        if "demand_bytes_per_step" in row and link_gbs is not None:
            row["limit_ms"] = max(compute, row["demand_bytes_per_step"] / link_gbs / 1e6)
    return made


def unmeasured_row(case: Case, batch: int, key: str, status: str, reason: str | None) -> Row:
    """A row that says why it has no figures."""
    return {**named(case, batch, key), "status": status, "reason": reason}


def named(case: Case, batch: int, key: str) -> Row:
    """The columns by which a row is found."""
    return {"engine": case.engine.name, "slots": case.slots, "batch": batch, "key": key}


def break_even(rows: Iterable[Row]) -> list[str]:
    """For each of our engines and sizes, where it stops being faster than each baseline."""
    rows = [row for row in rows if row["status"] == "ok"]
    by: dict[tuple[str, int | None], dict[int, float]] = {}
    for row in rows:
        by.setdefault((row["engine"], row["slots"]), {})[row["batch"]] = row["step_ms"]
    lines = []
    for (engine, slots), ours in by.items():
        if engine.partition("+")[0] not in ("full", "segmented", "eager"):
            continue
        said = []
        for other in BASELINES:
            theirs = by.get((other, slots)) or by.get((other, None))
            if other == ("resident" if engine.startswith("eager") else "resident-eager"):
                continue
            shared = sorted(set(ours) & set(theirs or {}))
            if theirs is None or not shared:
                continue
            # As printed: a step of 1.00x is not called faster.
            faster = [batch for batch in shared if round(theirs[batch] / ours[batch], 2) > 1]
            ratios = f"{theirs[shared[0]] / ours[shared[0]]:.2f}x at batch {shared[0]}"
            if len(shared) > 1:
                ratios += f", {theirs[shared[-1]] / ours[shared[-1]]:.2f}x at {shared[-1]}"
            if len(faster) == len(shared):
                where = "faster at every batch"
            elif not faster:
                where = "at no batch faster"
            else:
                where = f"faster at batch {', '.join(map(str, faster))}"
            said.append(f"than {other}: {where} ({ratios})")
        if said:
            lines.append(f"{engine}:{slots} " + "; ".join(said))
    return lines


def metrics_ratios(rows: Iterable[Row]) -> list[tuple[str, int | None, int, float]]:
    """(engine, slots, batch, step with metrics / without), of the same run."""
    steps = {
        (row["engine"], row["slots"], row["batch"]): row["step_ms"]
        for row in rows
        if row["status"] == "ok"
    }
    found = []
    for (engine, slots, batch), ms in steps.items():
        without = steps.get((engine.removesuffix("+metrics"), slots, batch))
        if engine.endswith("+metrics") and without is not None:
            found.append((engine, slots, batch, ms / without))
    return found
