"""The clients of a run, each a process of its own, all on the published Python client.

    worker.py configure|producer|departure-board|delay-claims URL RUN_DIR DATA_FILE PROFILE SEED

The client is used unchanged. What it sends and gets is written down underneath it, by its own hook for
an HTTP transport, so the journal holds what the broker answered and not what a client made of it.
"""

import asyncio
import json
import os
import signal
import sys
import time

import httpx
from queen import Queen

import plan as plans


class JournalTransport(httpx.AsyncBaseTransport):
    """Sends a request; writes one line before it leaves and one line before its answer is handed over."""

    def __init__(self, journal, seen=None):
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=100))
        self._journal, self._seen, self._calls = journal, seen, 0

    async def handle_async_request(self, request):
        self._calls += 1
        call, path = self._calls, request.url.path
        if path.endswith("/push"):
            items = json.loads(request.content)["items"]
            sent = [[item["transactionId"], item["partition"]] for item in items]
            self._journal.write(op="push", call=call, items=sent)
        elif path.endswith("/ack") or path.endswith("/ack/batch"):
            body = json.loads(request.content)
            acks = body["acknowledgments"] if "acknowledgments" in body else [body]
            keys = ("transactionId", "leaseId", "status", "error")
            self._journal.write(op="ack", call=call, items=[[ack.get(key) for key in keys] for ack in acks])
        try:
            response = await self._inner.handle_async_request(request)
            await response.aread()
        except httpx.ConnectError as error:  # nothing left this process
            self._journal.write(op="unsent", call=call, path=path, error=repr(error))
            raise
        except Exception as error:
            self._journal.write(op="lost", call=call, path=path, error=repr(error))
            raise
        self._write_answer(call, path, response)
        return response

    def _write_answer(self, call, path, response):
        if response.status_code == 204:
            return
        try:
            body = response.json()
        except ValueError:
            body = response.text[:500]
        good = response.status_code in (200, 201)
        if good and "/pop/" in path and isinstance(body, dict):
            got = [
                [m["transactionId"], m["partition"], m["leaseId"], m["deliveryAttempt"], plans.digest(m["data"])]
                for m in body["messages"]
            ]
            self._journal.write(op="delivered", call=call, at=time.monotonic(), messages=got)
            if self._seen:
                self._seen(txn for txn, *_ in got)
        elif good and isinstance(body, list) and path.endswith(("/push", "/ack", "/ack/batch")):
            keys = ("status", "offset") if path.endswith("/push") else ("success", "error", "leaseReleased", "dlq", "noop")
            self._journal.write(op="answer", call=call, results=[[row.get(key) for key in keys] for row in body])
        elif not good:
            self._journal.write(op="refused", call=call, path=path, status=response.status_code, body=body)

    async def aclose(self):
        await self._inner.aclose()


def say(*words):
    print(time.strftime("%H:%M:%S"), *words, flush=True)


async def configure(url, plan):
    queen = Queen(url)
    options = {"lease_time": plan.profile.lease_seconds, "retry_limit": plan.profile.retry_limit}
    answer = await queen.queue(plans.QUEUE).config(options).create()
    say(f"configured {answer['queue']}: {answer['options']}")
    await queen.close()


async def produce(url, run_dir, plan):
    journal = plans.Journal(os.path.join(run_dir, "producer.jsonl"))
    queen = Queen(url, transport=JournalTransport(journal), timeout_millis=10000)
    lanes = asyncio.Semaphore(6)

    async def push(airport, txns):
        # One push of a partition at a time, repeated until it is answered. A repeat has the same ids, so
        # what did get stored the first time comes back as `duplicate` and nothing is stored twice.
        batch = [{"transactionId": txn, "data": plan.data[txn]} for txn in txns]
        async with lanes:
            while True:
                try:
                    await queen.queue(plans.QUEUE).partition(airport).push(batch)
                    return
                except Exception as error:
                    say(f"push to {airport} again: {error!r}")
                    await asyncio.sleep(0.3)

    windows = list(plan.windows())
    for number, window in enumerate(windows):
        if number == len(windows) // 2:
            # Both groups shall be at work when the broker dies, so the second half waits for them.
            while not os.path.exists(os.path.join(run_dir, "second-half")):
                await asyncio.sleep(0.05)
        await asyncio.gather(*(push(airport, txns) for airport, txns in window.items()))
    await queen.close()
    open(os.path.join(run_dir, "all-pushed"), "w").close()
    say("all pushed")


class Consumer:
    """Consumes until every record was delivered and, for longer than a lease, nothing came any more."""

    def __init__(self, group, url, run_dir, plan):
        self.plan, self.group, self.run_dir = plan, group, run_dir
        self.journal = plans.Journal(os.path.join(run_dir, f"{group}.jsonl"))
        transport = JournalTransport(self.journal, self.delivered)
        self.queen = Queen(url, transport=transport, timeout_millis=10000)
        self.stop, self.seen, self.last = asyncio.Event(), set(), time.monotonic()
        self.failed_once = set()

    def delivered(self, txns):
        self.seen.update(txns)
        self.last = time.monotonic()

    async def file_claim(self, message):
        txn = message["transactionId"]
        fate = self.plan.fate[txn]
        if fate == plans.ALWAYS or (fate == plans.ONCE and txn not in self.failed_once):
            self.failed_once.add(txn)
            raise RuntimeError(self.plan.reason(txn))

    async def show_on_board(self, messages):
        await asyncio.sleep(0)

    async def consume(self):
        profile = self.plan.profile
        while not self.stop.is_set():
            # `all`: a new group would otherwise begin at the end of the log.
            queue = self.queen.queue(plans.QUEUE).group(self.group).subscription_mode("all").timeout_millis(1000)
            if self.group == plans.CLAIMS:
                # One partition a pop: after a failure the client drops the rest of the batch, and what it
                # holds of other partitions would stay leased.
                loop = queue.concurrency(4).batch(profile.claims_batch).partitions(1).each()
                handler = self.file_claim
            else:
                loop = queue.concurrency(2).batch(profile.board_batch).partitions(profile.board_width)
                handler = self.show_on_board
            try:
                await loop.consume(handler, signal=self.stop)
            except Exception as error:
                # A pop whose connection broke has an error without a text, and the client's loop ends on it.
                self.journal.write(op="loop-ended", error=repr(error))
                say(f"consume loop again: {error!r}")
                await asyncio.sleep(0.3)

    async def run(self):
        task = asyncio.create_task(self.consume())
        quiet = self.plan.profile.lease_seconds + 2
        while not task.done() and not self.stop.is_set():
            await asyncio.sleep(0.2)
            if len(self.seen) >= len(self.plan.records) and time.monotonic() - self.last > quiet:
                self.stop.set()
        await task
        await self.queen.close()
        say("done")


async def main(role, url, run_dir, data_path, profile, seed):
    plan = plans.Plan(data_path, plans.PROFILES[profile], seed)
    if role == "configure":
        await configure(url, plan)
    elif role == "producer":
        await produce(url, run_dir, plan)
    else:
        consumer = Consumer(role, url, run_dir, plan)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop.set)
        await consumer.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
