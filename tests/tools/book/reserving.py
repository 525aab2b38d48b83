"""Processes that charge runs to one book and are killed; a script without JAX.

    python reserving.py BOOK FOLDER RUNS KILLS

Six workers charge RUNS runs, each its own share, and record every charge that
returned. A worker is killed at a random moment, KILLS times, and restarted: it
then charges its current run under the same name, as a resumed run does.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from jaxdp_episodic.tools.book.book import Order, charge, read_book
from jaxdp_episodic.tools.book.content import Protected

PROTECTED = Protected("example", "add_remove", None, "ab" * 32)
WORKERS = 6


def order(mu, floor):
    price = {"mu": mu, "floor": floor}
    return Order("query", "q", PROTECTED, {"query": 1}, lambda terms: price)


def work(book, log, runs, one):
    """Charges every run that is not recorded yet, in order."""
    done = log.read_text().splitlines() if log.exists() else []
    with open(log, "a") as file:
        for run in runs[len(done) :]:
            # The same session each time: we may have been killed after a commit.
            entry = charge(book, one, run=run, sessions=("s",), session="s")
            assert entry.run == run
            file.write(f"{run}\n")
            file.flush()


def start(book, folder, worker, runs, one):
    child = os.fork()
    if child == 0:
        try:
            work(book, folder / f"{worker}.log", runs, one)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main(book, folder, num_runs, num_kills):
    folder = Path(folder)
    budget = read_book(book).terms.prices.budget
    # The total allows exactly this many.
    one = order(budget.mu / (num_runs + 0.5) ** 0.5, budget.floors / (num_runs + 1))
    shares = [
        [f"{worker}-{i}" for i in range(worker, num_runs, WORKERS)]
        for worker in range(WORKERS)
    ]
    chance = random.Random(20)
    alive = {w: start(book, folder, w, shares[w], one) for w in range(WORKERS)}
    killed = 0
    while alive:
        time.sleep(chance.uniform(0.0, 0.03))
        worker = chance.choice(list(alive))
        if killed < num_kills:
            os.kill(alive[worker], signal.SIGKILL)
            _, status = os.waitpid(alive[worker], 0)
            if status == 0:
                del alive[worker]
                continue
            assert os.WIFSIGNALED(status), status
            killed += 1
            alive[worker] = start(book, folder, worker, shares[worker], one)
            continue
        _, status = os.waitpid(alive.pop(worker), 0)
        assert status == 0, status
    print(killed)
    try:
        charge(book, one, run="one more", sessions=(), session="s")
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
