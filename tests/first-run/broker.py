"""The broker under test: started, killed and started again by this script, and by nobody else."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request


# Role and database in the embedded cluster. Its private socket lets the broker's own user in.
ROLE = DATABASE = "regent"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url, timeout=5):
    """(status, body as text); status 0 when there was no answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Broker:
    def __init__(self, binary, run_dir):
        self.binary, self.run_dir = binary, pathlib.Path(run_dir)
        self.data_dir = self.run_dir / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process, self.starts = None, 0

    def start(self, deadline_seconds=60):
        """Starts the broker and waits until it says that it is healthy. Returns the seconds it took."""
        self.starts += 1
        # Settings of the caller's environment must not leak in, least of all another database.
        ours = ("DATABASE_URL", "PORT", "HOST", "PG_", "QUEEN_", "REGENT_", "JWT_", "FILE_BUFFER_")
        keep = ("PG_BIN_DIR",)
        environment = {k: v for k, v in os.environ.items() if k in keep or not k.startswith(ours)}
        command = [self.binary, "--host", "127.0.0.1", "--port", self.port, "--data-dir", self.data_dir]
        log = open(self.run_dir / f"broker-{self.starts}.log", "w")
        began = time.monotonic()
        self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, env=environment)
        while time.monotonic() - began < deadline_seconds:
            if self.process.poll() is not None:
                raise SystemExit(f"the broker ended with {self.process.returncode}:\n{self.log_tail()}")
            status, body = get(f"{self.url}/health", timeout=2)
            if status == 200 and json.loads(body).get("status") == "healthy":
                return time.monotonic() - began
            time.sleep(0.05)
        raise SystemExit(f"the broker is not healthy after {deadline_seconds} s:\n{self.log_tail()}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, deadline_seconds=30):
        """Asks it to end. Returns its exit code, or None when it had to be killed."""
        if self.process is None or self.process.poll() is not None:
            return self.process and self.process.returncode
        self.process.terminate()
        try:
            return self.process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def log_tail(self, lines=25):
        text = (self.run_dir / f"broker-{self.starts}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def postmaster(self):
        """(pid, port, socket folder) of the embedded PostgreSQL, from its own pid file; None when it is down."""
        for path in self.data_dir.glob("**/postmaster.pid"):
            lines = path.read_text().splitlines()
            pid = int(lines[0])
            if len(lines) > 4 and pathlib.Path(f"/proc/{pid}").exists():
                return pid, lines[3].strip(), lines[4].strip()
        return None

    def stop_database(self):
        """Ends the PostgreSQL of this data folder if a killed broker left it running."""
        found = self.postmaster()
        if found:
            os.kill(found[0], signal.SIGINT)
        return found is not None

    def dead_letters(self, queue, group):
        """(how they were read, rows) in the shape of GET /api/v1/dlq."""
        rows, page = [], 100
        while True:
            query = {"queue": queue, "consumerGroup": group, "limit": page, "offset": len(rows)}
            status, body = get(f"{self.url}/api/v1/dlq?{urllib.parse.urlencode(query)}")
            if status != 200:
                break
            got = json.loads(body)["messages"]
            rows += got
            if len(got) < page:
                return "GET /api/v1/dlq", rows
        if status not in (404, 405, 501):
            raise SystemExit(f"GET /api/v1/dlq answered {status}: {body}")
        return f"table queen.dead_letters (the route answers {status})", self.dead_letters_by_psql(queue, group)

    def dead_letters_by_psql(self, queue, group):
        """The same rows from the embedded cluster, for a broker that has no such route yet."""
        _, port, folder = self.postmaster()
        # psql quotes the two names itself (:'name'); the statement is read from its input.
        statement = """
            SELECT coalesce(json_agg(json_build_object(
                'transactionId', transaction_id, 'queue', queue_name, 'partition', partition_name,
                'consumerGroup', group_name, 'errorMessage', reason, 'retryCount', retry_count,
                'data', convert_from(payload, 'UTF8')::json)), '[]')
            FROM queen.dead_letters WHERE queue_name = :'queue' AND group_name = :'group'
        """
        command = ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-v", f"queue={queue}", "-v", f"group={group}"]
        command += ["-h", folder or "127.0.0.1", "-p", port, "-U", ROLE, "-d", DATABASE]
        answer = subprocess.run(command, input=statement, capture_output=True, text=True)
        if answer.returncode != 0:
            raise SystemExit(f"cannot read queen.dead_letters with psql:\n{answer.stderr}")
        return json.loads(answer.stdout)
