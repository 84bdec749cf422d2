"""Judges a run by its journals: reads them line by line, keeps what each answer promised, and reports
every promise that a later line breaks. It talks to nobody, so it can judge a run again, or a spoilt copy.

Terms: a *lane* is one partition as one group sees it. A record is *done* when a `completed` ack of it was
answered `success`, or a `failed` ack of it was answered `dlq`. It is *in doubt* while an ack of it has no
answer: still under way, or lost with its connection. A record in doubt may come back or may not.
"""

import collections
import copy

import plan as plans

ACKED, DEAD = "acked", "dead-lettered"


class Verdict:
    """Collects violations by kind, and the figures of the summary."""

    def __init__(self):
        self.violations, self.figures = [], collections.OrderedDict()

    def fail(self, kind, text):
        self.violations.append((kind, text))

    def kinds(self):
        return collections.Counter(kind for kind, _ in self.violations)


def check_pushes(plan, lines, verdict):
    """Each record stored once, at its own place: dense offsets in the order of the pushes."""
    calls, accepted, unanswered = {}, {}, set()
    count = collections.Counter()
    for line in lines:
        if line["op"] == "push":
            calls[line["call"]] = line["items"]
            count["push requests"] += 1
        elif line["op"] == "unsent":
            count["push requests that found no broker"] += 1
        elif line["op"] in ("lost", "refused"):
            unanswered.update(txn for txn, _ in calls.get(line["call"], ()))
            count["push requests without an answer"] += 1
        elif line["op"] == "answer":
            for (txn, airport), (status, offset) in zip(calls[line["call"]], line["results"], strict=True):
                count[f"answered {status}"] += 1
                if status == "queued" and txn in accepted:
                    verdict.fail("stored-twice", f"{txn} in {airport} answered queued, was {accepted[txn]}")
                if status == "duplicate" and txn not in unanswered and txn not in accepted:
                    verdict.fail("false-duplicate", f"{txn} in {airport} answered duplicate on its first push")
                if status in ("queued", "duplicate") and offset != plan.place[txn]:
                    verdict.fail("offset", f"{txn} is number {plan.place[txn]} of {airport}, has offset {offset}")
                if status in ("queued", "duplicate", "buffered"):
                    accepted.setdefault(txn, status)
    for txn, airport, _ in plan.records:
        if txn not in accepted:
            verdict.fail("not-pushed", f"{txn} in {airport} was never accepted")
    verdict.figures["producer"] = {"records": len(plan.records), "partitions": len(plan.lanes), **count}


class Lane:
    """What the journal says about one partition of one group, up to the line just read."""

    def __init__(self, txns):
        self.txns = txns
        self.first_seen = 0  # records below this place were delivered at least once
        self.settled = 0  # records below this place are done
        self.charged = (0, 0)  # retry budget spent, at least and at most
        self.nacked = set()  # leases that a failed ack was sent on


class GroupReplay:
    """Reads the journal of one group in order."""

    def __init__(self, plan, group, kills, verdict):
        self.plan, self.group, self.kills, self.verdict = plan, group, kills, verdict
        self.lanes = {airport: Lane(txns) for airport, txns in plan.lanes.items()}
        self.done, self.doubt = {}, collections.Counter()
        self.lease, self.when = {}, {}  # of the latest delivery
        self.nacks_sent, self.nacks = collections.Counter(), collections.Counter()
        self.calls, self.count = {}, collections.Counter()

    def fail(self, kind, text):
        self.verdict.fail(kind, f"{self.group}: {text}")

    def read(self, lines):
        for line in lines:
            op = line["op"]
            if op == "delivered":
                runs = collections.OrderedDict()
                for message in line["messages"]:
                    runs.setdefault(message[1], []).append(message)
                self.count["pops with messages"] += 1
                for airport, run in runs.items():
                    self.delivered(airport, run, line["at"])
            elif op == "ack":
                self.ack_sent(line)
            elif op == "answer" and line["call"] in self.calls:
                self.ack_answered(self.calls[line["call"]], line["results"])
            elif op == "unsent":
                self.unsent(self.calls.get(line["call"], ()))
            elif op in ("lost", "refused") and line["call"] in self.calls:
                self.ack_lost(self.calls[line["call"]])
            elif op in ("lost", "refused"):
                self.count["pops without an answer"] += 1
            elif op == "loop-ended":
                self.count["consume loops restarted"] += 1

    def delivered(self, airport, run, at):
        lane = self.lanes.get(airport)
        known = [message for message in run if self.plan.airport.get(message[0]) == airport]
        for txn, *_ in run:
            if self.plan.airport.get(txn) != airport:
                self.fail("foreign", f"{txn} delivered in partition {airport}")
        if not known:
            return
        places = [self.plan.place[message[0]] for message in known]
        if places != list(range(places[0], places[0] + len(places))):
            self.fail("reordered", f"one pop of {airport} delivered places {places}")
        while lane.settled < len(lane.txns) and lane.txns[lane.settled] in self.done:
            lane.settled += 1
        for txn in lane.txns[lane.settled : places[0]]:
            if txn not in self.done and not self.doubt[txn]:
                self.fail("overtaken", f"{airport} place {places[0]} delivered before {txn} was settled")
                break
        for (txn, _, lease, attempt, digest), place in zip(known, places):
            self.count["deliveries"] += 1
            if digest != plans.digest(self.plan.data[txn]):
                self.fail("altered", f"{txn} came with other data")
            if txn in self.done:
                self.fail("redelivered", f"{txn} in {airport} came back after it was {self.done[txn]}")
            if txn not in self.lease:
                if place != lane.first_seen:
                    self.fail("reordered", f"{txn} first came at place {lane.first_seen} of {airport}, not {place}")
                lane.first_seen += 1
                self.count["records delivered"] += 1
            else:
                self.count["redeliveries"] += 1
                self.check_two_leases(lane, txn, lease, at)
            self.lease[txn], self.when[txn] = lease, at

    def check_two_leases(self, lane, txn, lease, at):
        # Half a lease is a wide margin for a slow machine. A lease that a kill cut short is left out: the
        # broker may lose the newest claims when its database goes down with it.
        old, since = self.lease[txn], self.when[txn]
        if old in lane.nacked or any(since < kill < at for kill in self.kills):
            return
        if old == lease:
            self.fail("two-leases", f"{txn} came twice under one lease")
        elif at - since < self.plan.profile.lease_seconds / 2:
            self.fail("two-leases", f"{txn} came again {at - since:.1f} s into a lease that nobody gave up")

    def ack_sent(self, line):
        self.calls[line["call"]] = line["items"]
        self.count["ack requests"] += 1
        for txn, lease, status, _ in line["items"]:
            self.doubt[txn] += 1
            if status == "failed":
                self.nacks_sent[txn] += 1
                self.lanes[self.plan.airport[txn]].nacked.add(lease)

    def unsent(self, items):
        self.count["requests that found no broker"] += 1
        for txn, *_ in items:
            self.doubt[txn] -= 1

    def ack_lost(self, items):
        self.count["ack requests without an answer"] += 1
        limit = self.plan.profile.retry_limit
        for txn, _, status, _ in items:
            lane = self.lanes[self.plan.airport[txn]]
            low, high = lane.charged
            if status == "failed":
                lane.charged = (0 if high >= limit else low, min(high + 1, limit))
            else:
                lane.charged = (0, high)

    def ack_answered(self, items, results):
        for (txn, lease, status, error), (success, problem, released, dlq, noop) in zip(items, results, strict=True):
            self.doubt[txn] -= 1
            lane = self.lanes[self.plan.airport[txn]]
            if not success:
                self.count[f"acks refused: {problem}"] += 1
            elif status == "completed":
                self.completed(lane, txn, lease, released, noop)
            else:
                self.failed(lane, txn, dlq)

    def completed(self, lane, txn, lease, released, noop):
        if noop and txn not in self.done and not self.doubt[txn]:
            self.fail("false-noop", f"{txn} was called finished before any ack of it")
        if not noop and txn in self.done:
            self.fail("redelivered", f"{txn} was acknowledged twice, it was {self.done[txn]}")
        if not noop and lease != self.lease.get(txn):
            self.fail("two-leases", f"an ack of {txn} was taken on a lease that is not its latest")
        self.done[txn] = ACKED
        if released:
            lane.charged = (0, 0)

    def failed(self, lane, txn, dlq):
        low, high = lane.charged
        limit = self.plan.profile.retry_limit
        self.nacks[txn] += 1
        if dlq and high < limit:
            self.fail("budget", f"{txn} was dead-lettered after {high} of {limit} charged failures")
        if not dlq and low >= limit:
            self.fail("budget", f"{txn} was not dead-lettered though {low} of {limit} failures were charged")
        if dlq:
            self.done[txn] = DEAD
            lane.charged = (0, 0)
        else:
            lane.charged = (min(low + 1, limit), min(high + 1, limit))

    def finish(self):
        """Nothing more comes: every record was delivered and is done, or its ack lost its answer."""
        for txn, airport, _ in self.plan.records:
            if txn not in self.lease:
                self.fail("lost", f"{txn} in {airport} was never delivered")
            elif txn not in self.done and not self.doubt[txn]:
                self.fail("unfinished", f"{txn} in {airport} was delivered and never settled")
        states = collections.Counter(self.done.values())
        doubt = sum(1 for txn, _, _ in self.plan.records if txn not in self.done and self.doubt[txn])
        self.verdict.figures[self.group] = {
            **self.count,
            "acks answered success": states[ACKED],
            "failed acks answered success": sum(self.nacks.values()),
            "dead-lettered": states[DEAD],
            "settled by an ack whose answer was lost": doubt,
        }


def check_fates(plan, replay):
    """The failing handler failed what it should, and nothing that must fail was acknowledged."""
    for txn in plan.with_fate(plans.ALWAYS):
        if replay.done.get(txn) == ACKED:
            replay.fail("wrong-fate", f"{txn} always fails and was acknowledged")
    for txn in plan.with_fate(plans.ONCE):
        if replay.done.get(txn) == DEAD:
            replay.fail("wrong-fate", f"{txn} fails once and was dead-lettered")
        if not replay.nacks_sent[txn]:
            replay.fail("wrong-fate", f"{txn} fails once and no failed ack of it was sent")


def check_dead_letters(plan, group, rows, verdict):
    """Exactly the records that always fail, once each, with reason, address and data."""
    expected = set(plan.with_fate(plans.ALWAYS)) if group == plans.CLAIMS else set()
    found = collections.Counter(row["transactionId"] for row in rows)
    for txn in sorted(expected - set(found)):
        verdict.fail("missing-dlq", f"{group}: {txn} is not among the dead letters")
    for txn, times in found.items():
        if txn not in expected:
            verdict.fail("extra-dlq", f"{group}: {txn} is dead-lettered and should not be")
        elif times > 1:
            verdict.fail("extra-dlq", f"{group}: {txn} is dead-lettered {times} times")
    for row in rows:
        txn = row["transactionId"]
        if txn not in expected:
            continue
        if row["errorMessage"] != plan.reason(txn):
            verdict.fail("dlq-reason", f"{group}: {txn} has reason {row['errorMessage']!r}")
        address = (row["queue"], row["partition"], row["consumerGroup"])
        if address != (plans.QUEUE, plan.airport[txn], group) or row["data"] != plan.data[txn]:
            verdict.fail("dlq-row", f"{group}: {txn} has address {address} or other data")
    verdict.figures[group]["dead letters read back"] = len(rows)


def check(plan, journals, dead_letters, events):
    """journals: name -> lines; dead_letters: group -> rows. Returns a Verdict."""
    verdict = Verdict()
    kills = [event["at"] for event in events if event["op"] == "killed"]
    check_pushes(plan, journals["producer"], verdict)
    for group in plans.GROUPS:
        replay = GroupReplay(plan, group, kills, verdict)
        replay.read(journals[group])
        if group == plans.CLAIMS:
            check_fates(plan, replay)
        replay.finish()
        check_dead_letters(plan, group, dead_letters[group], verdict)
    if any(event["op"] == "timed-out" for event in events):
        verdict.fail("timed-out", "the clients waited for records that did not come")
    if not kills:
        verdict.fail("no-kill", "the broker was never killed")
    return verdict


# --- Proof that the checker can fail: spoil a copy of a good run in one way, and expect that kind of report.


def plant_lost(plan, journals, dead_letters):
    victim = plan.with_fate(plans.FINE)[len(plan.records) // 3]
    for line in journals[plans.CLAIMS]:
        if line["op"] == "delivered":
            line["messages"] = [message for message in line["messages"] if message[0] != victim]
    return f"no delivery of {victim} to {plans.CLAIMS}"


def plant_reordered(plan, journals, dead_letters):
    for line in journals[plans.BOARD]:
        messages = line.get("messages", [])
        for one, two in zip(messages, messages[1:]):
            if one[1] == two[1]:
                spot = messages.index(one)
                messages[spot], messages[spot + 1] = two, one
                return f"{two[0]} before {one[0]} in {one[1]} for {plans.BOARD}"
    raise SystemExit("the journal has no two records of one partition in one pop")


def plant_redelivered(plan, journals, dead_letters):
    victim = plan.with_fate(plans.FINE)[0]
    message = [victim, plan.airport[victim], "planted-lease", 1, plans.digest(plan.data[victim])]
    journals[plans.BOARD].append({"op": "delivered", "call": 0, "at": 1e12, "messages": [message]})
    return f"{victim} delivered again to {plans.BOARD} at the end"


def plant_missing_dlq(plan, journals, dead_letters):
    row = dead_letters[plans.CLAIMS].pop()
    return f"no dead letter for {row['transactionId']}"


PLANTS = {
    "lost": plant_lost,
    "reordered": plant_reordered,
    "redelivered": plant_redelivered,
    "missing-dlq": plant_missing_dlq,
}


def spoil(kind, plan, journals, dead_letters):
    """A spoilt copy of the run: (journals, dead letters, what was done)."""
    journals, dead_letters = copy.deepcopy(journals), copy.deepcopy(dead_letters)
    told = PLANTS[kind](plan, journals, dead_letters)
    return journals, dead_letters, told
