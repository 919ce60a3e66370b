"""Laws on several processes: each takes an algorithm at a time, so that its laws share runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from properties.law import CheckResult, Context, Law
from properties.run import run_law
from properties.user_variant import load_variant, variant_laws

# How often progress is looked at, in seconds.
_TICK = 0.2
# Each process has a core of its own: threads within one would be in the way of the others.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Traffic = Mapping[tuple[str, str, str], tuple[int, int]]


@dataclass(frozen=True)
class Job:
    """Laws of one algorithm, by name: what a process is told."""

    algorithm: str
    laws: tuple[str, ...]
    on: str
    gpu: str
    examples: int | None
    seed: int
    variant: Path | None = None


def run_laws(
    laws: Sequence[Law],
    context: Context,
    examples: int | None,
    seed: int,
    progress: Callable[[Law, int], None],
) -> list[CheckResult]:
    """Runs laws one after another; ``progress`` is told the cases of each so far."""
    return [
        run_law(
            law, context, examples=examples, seed=seed,
            progress=lambda cases, law=law: progress(law, cases),  # type: ignore[misc]
        )
        for law in laws
    ]  # fmt: skip


def run_jobs(
    jobs: Sequence[Job], processes: int, progress: Callable[[str, int], None]
) -> tuple[dict[str, list[CheckResult]], list[Traffic]]:
    """Results by algorithm, and the traffic of each job.

    ``progress`` is told the algorithm and how many more of its cases are done. An interruption, or
    an error in a process, ends them all.
    """
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, list[CheckResult]] = {}
    traffic: list[Traffic] = []
    with _environment(_ONE_THREAD), spawn.Manager() as manager:
        queue = manager.Queue()
        pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_ignore_interruption)
        try:
            running: dict[Future[Any], Job] = {pool.submit(_work, job, queue): job for job in jobs}
            while running:
                done, _ = wait(running, timeout=_TICK, return_when=FIRST_COMPLETED)
                for algorithm, cases in _waiting(queue):
                    progress(algorithm, cases)
                for future in done:
                    job = running.pop(future)
                    results[job.algorithm], counted = future.result()
                    traffic.append(counted)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        pool.shutdown()
    return results, traffic


def laws_of(algorithm: str, variant: Path | None) -> list[Law]:
    """The laws of an algorithm, or those that a user's variant has there."""
    from properties import catalog

    if variant is None:
        return catalog.laws(algorithm)
    return [law for law in variant_laws(load_variant(variant)) if law.algorithm == algorithm]


def _ignore_interruption() -> None:
    """The process that was started first ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(job: Job, queue: Any) -> tuple[list[CheckResult], Traffic]:
    """In a process of its own."""
    from simkit.cli.verification import open_context

    context = open_context(job.on, job.gpu)
    chosen = [law for law in laws_of(job.algorithm, job.variant) if law.name in job.laws]
    before: dict[str, int] = {}

    def progress(law: Law, cases: int) -> None:
        queue.put((job.algorithm, cases - before.get(law.name, 0)))
        before[law.name] = cases

    return run_laws(chosen, context, job.examples, job.seed, progress), dict(context.traffic)


def _waiting(queue: Any) -> Iterator[tuple[str, int]]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The variables for processes that start within."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
