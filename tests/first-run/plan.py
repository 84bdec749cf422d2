"""What a run does, decided before it starts: the records, their order, the failures.

The worker acts on this plan and the checker judges by it, so both import it. Everything here is a
pure function of the data file and the options: two runs with one seed fail the same records.
"""

import collections
import hashlib
import json
import os

QUEUE = "flights.departures"
BOARD = "departure-board"  # the clean group: takes batches over several partitions
CLAIMS = "delay-claims"  # the group whose handler fails: takes records one by one
GROUPS = (BOARD, CLAIMS)

CLIENT = "queen-mq==1.3.0"
DATA_PACKAGE = "vega-datasets@3.2.1"
DATA_FILE = "package/data/flights-20k.json"
DATA_SHA256 = "52f0ddd892d4569284b845e17323abc9afb7d303ec8f63251634a20327a610bb"

FINE, ONCE, ALWAYS = "fine", "once", "always"

Profile = collections.namedtuple(
    "Profile",
    "name records airports lease_seconds retry_limit board_batch board_width claims_batch push_window "
    "once_rate always_rate deadline_seconds",
)
FULL = Profile("full", None, None, 10, 2, 100, 8, 20, 500, 0.02, 0.008, 900)
SMALL = Profile("small", 400, 10, 4, 2, 40, 4, 10, 80, 0.05, 0.04, 120)
PROFILES = {p.name: p for p in (FULL, SMALL)}


def canonical(value):
    """One spelling per JSON value, so that a record can be compared before and after."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value):
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def _draw(seed, word):
    """A number in [0, 1) that depends on the seed and the word only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{word}".encode()).digest()[:8], "big") / 2**64


class Plan:
    """records: [(txn, airport, data)] in file order; lanes: airport -> [txn] in the order of the pushes."""

    def __init__(self, data_path, profile, seed):
        self.profile = profile
        with open(data_path, encoding="utf-8") as file:
            rows = json.load(file)
        kept = [(f"flight-{number:06d}", row["origin"], row) for number, row in enumerate(rows)]
        if profile.airports:
            busiest = collections.Counter(airport for _, airport, _ in kept).most_common(profile.airports)
            names = {airport for airport, _ in busiest}
            kept = [record for record in kept if record[1] in names]
        self.records = kept[: profile.records] if profile.records else kept
        self.lanes = collections.defaultdict(list)
        self.airport, self.data, self.place = {}, {}, {}
        for txn, airport, row in self.records:
            self.place[txn] = len(self.lanes[airport])
            self.lanes[airport].append(txn)
            self.airport[txn], self.data[txn] = airport, row
        self.fate = {}
        for airport, lane in self.lanes.items():
            self._choose_failures(lane, seed)

    def _choose_failures(self, lane, seed):
        # The broker counts its retry budget per (partition, group), not per record. Two failing records in
        # one batch would spend one budget between them; a batch apart, each has a full one.
        profile, last = self.profile, -self.profile.claims_batch
        for place, txn in enumerate(lane):
            draw = _draw(seed, txn)
            self.fate[txn] = FINE
            if place - last < profile.claims_batch or draw >= profile.always_rate + profile.once_rate:
                continue
            self.fate[txn] = ALWAYS if draw < profile.always_rate else ONCE
            last = place

    def with_fate(self, fate):
        return [txn for txn, _, _ in self.records if self.fate[txn] == fate]

    def reason(self, txn):
        """What the failing handler says; the dead letter must carry it word for word."""
        row = self.data[txn]
        return f"no claim tariff for {row['origin']}-{row['destination']} ({txn}, delay {row['delay']} min)"

    def windows(self):
        """The pushes, in order: a window of the file, split by airport. Windows follow one another."""
        size = self.profile.push_window
        for start in range(0, len(self.records), size):
            parts = collections.defaultdict(list)
            for txn, airport, _ in self.records[start : start + size]:
                parts[airport].append(txn)
            yield parts


class Journal:
    """Append-only lines of JSON. A line is written before the client sees the answer that it tells of."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, **line):
        os.write(self._fd, (json.dumps(line, ensure_ascii=False) + "\n").encode())


def read_journal(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
