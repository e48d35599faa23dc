"""Checks on a machine with systemd and cgroup v2, where limits apply.

Prints a line for each check, PASS or FAIL with details, and at the end one line
that begins with RESULT. The checks go on from each other: the same sandboxes
live through all of them. In their midst the machine reboots, and this program
goes on after that. Nothing waits without a bound.
"""

import collections
import http.client
import json
import os
import pwd
import socket
import ssl
import subprocess
import time
import traceback
from pathlib import Path
from urllib.parse import urlsplit

HOME = Path("/var/lib/doze")
UNIT = Path("/sys/fs/cgroup/system.slice/doze.service")
TREE = Path("/opt/doze")
CADDYFILE = Path("/etc/doze/Caddyfile")
# State that the checks before the reboot hand to the later ones.
KEPT = Path("/var/lib/doze-vm.json")
WAIT = 120  # seconds, for slow operations on a machine without KVM

LITE = {"memory.max": str(256 << 20), "memory.swap.max": "0", "pids.max": "128", "cpu.max": "25000 100000"}

Proc = collections.namedtuple("Proc", "pid uids inner command")


# The commands of docs/operations.md.


def documented(session, *omitted):
    """The commands of the blocks of a session, but for those with an omitted word."""
    text = (TREE / "docs/operations.md").read_text()
    blocks = [part.split("\n```")[0] for part in text.split(f"\n```sh run session={session}\n")[1:]]
    lines = [line for block in blocks for line in block.splitlines() if not any(word in line for word in omitted)]
    assert lines, f"docs/operations.md has no commands of session {session}"
    return lines


def follow(*commands):
    """Runs commands as root in the source tree."""
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "DOZE_HOME": str(HOME), "DOZE_HTTPS_PORT": "443"}
    script = "\n".join(commands)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], capture_output=True, text=True, timeout=4 * WAIT, env=env, stdin=subprocess.DEVNULL, cwd=TREE
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{script}: exit {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


# The machine.


def run(*command, timeout=WAIT, env=None, user=None):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=env, user=user, group=user,
        extra_groups=[] if user else None, stdin=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def unit(name):
    return run("systemctl", "show", "--property", name, "--value", "doze").strip()


def until(what, condition):
    """Returns the result of condition as soon as it is true."""
    deadline = time.monotonic() + WAIT
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT} s for {what}")
        time.sleep(0.05)
    return value


def processes(cgroup):
    """All processes in a cgroup and those below it."""
    found = []
    for file in cgroup.rglob("cgroup.procs"):
        for pid in file.read_text().split():
            try:
                status = Path("/proc", pid, "status").read_text()
                command = Path("/proc", pid, "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            fields = dict(line.split(":", 1) for line in status.splitlines())
            found.append(Proc(int(pid), {int(n) for n in fields["Uid"].split()}, int(fields["NSpid"].split()[-1]), command))
    return found


def keyed(file):
    return {key: int(value) for key, value in (line.split() for line in file.read_text().splitlines())}


# The node.


class Connection(http.client.HTTPSConnection):
    """All names lead to this machine; the node's own CA is trusted."""

    def __init__(self, host):
        trust = ssl.create_default_context(cafile=HOME / "caddy/pki/authorities/local/root.crt")
        super().__init__(host, 443, timeout=WAIT, context=trust)

    def connect(self):
        plain = socket.create_connection(("127.0.0.1", 443), timeout=WAIT)
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)


def api(method, path, body=None, want=(200, 201, 204)):
    connection = Connection("api.doze.localhost")
    try:
        token = (HOME / "token").read_text().strip()
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request(method, f"/api/v1{path}", data, headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status not in want:
        raise AssertionError(f"{method} {path}: {response.status} {text}")
    return json.loads(text) if text else None


class Sandbox:
    def __init__(self, name, id, url=None):
        self.name, self.id, self.url = name, id, url
        self.cgroup = UNIT / "sandboxes" / id

    @classmethod
    def create(cls, name, size):
        # Only requests put it to sleep here.
        made = api("POST", "/sandbox", {"name": name, "image": "base", "size": size, "sleep_after": "0s"})
        return cls(name, made["id"])

    def init(self):
        """The host's number of the sandbox's PID 1."""
        inits = [p for p in processes(self.cgroup) if p.inner == 1]
        if len(inits) != 1:
            raise AssertionError(f"{self.name} has {len(inits)} processes with PID 1")
        return inits[0].pid

    def limits(self):
        files = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
        return {name: (self.cgroup / name).read_text().strip() for name in files}

    def state(self):
        return api("GET", f"/sandbox/{self.id}")["state"]

    def events(self):
        return api("GET", f"/sandbox/{self.id}/events?limit=1000")["events"]

    def exec(self, command, timeout="60s"):
        return api("POST", f"/sandbox/{self.id}/exec", {"command": command, "timeout": timeout})

    def serve(self):
        """Serves a page with a preview; a counter shows that it keeps running."""
        self.exec("mkdir -p /srv && echo 'good morning' >/srv/index.html")
        api("POST", f"/sandbox/{self.id}/process", {"command": "exec httpd -f -p 8000 -h /srv", "restart": "on_wake"})
        self.url = api("POST", f"/sandbox/{self.id}/expose", {"port": 8000, "wait_timeout": "60s"})["url"]
        self.remember()
        self.visit()

    def remember(self):
        """Notes the processes that must keep running."""
        self.first, self.server = self.init(), self.serving()

    def serving(self):
        """The host's number of its server."""
        return next(p.pid for p in processes(self.cgroup) if p.command.startswith("httpd"))

    def visit(self):
        """Opens the preview; returns how it woke, if it did, and for how many ms."""
        connection = Connection(urlsplit(self.url).hostname)
        try:
            connection.request("GET", "/")
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        assert response.status == 200 and text == "good morning\n", f"preview: {response.status} {text}"
        timing = response.headers.get("Server-Timing", "").partition("dur=")[2]
        return response.headers.get("Doze-Wake"), float(timing or 0)

    def same(self):
        """Its processes are the noted ones, and it responds."""
        assert self.init() == self.first, f"{self.name}: PID 1 was {self.first}, is {self.init()}"
        assert self.serving() == self.server, f"{self.name}: its server was {self.server}, is {self.serving()}"
        return self.visit()


def main_pid():
    return int(unit("MainPID"))


def up():
    """The node runs and responds."""
    try:
        return unit("ActiveState") == "active" and main_pid() and api("GET", "/node")["engine"]["ok"]
    except (OSError, http.client.HTTPException, AssertionError):
        return False


# The checks, in order.

BEFORE, AFTER = [], []  # the reboot


def check(function):
    BEFORE.append(function)
    return function


def check_after_reboot(function):
    AFTER.append(function)
    return function


@check
def the_documented_installation_starts_it(ctx):
    began = time.monotonic()
    assert unit("ActiveState") == "active" and unit("UnitFileState") == "enabled", unit("ActiveState")
    ctx.node = main_pid()
    until("its certificates", up)  # Caddy gets them in the background
    return f"answers {time.monotonic() - began:.1f} s after it was ready"


@check
def all_limits_are_enforced(ctx):
    enforced = api("GET", "/node")["enforced_limits"]
    assert sorted(enforced) == ["cpu", "memory", "pids"], enforced
    return ", ".join(enforced)


@check
def doctor_finds_that_swap_is_missing(ctx):
    (found,) = [f for f in doctor(ctx) if not f["ok"]]
    assert found["name"] == "memory reclaim" and "no swap" in found["detail"] and "zram" in found["remedy"], found
    return found["detail"]


@check
def documented_zram_is_found(ctx):
    follow(*documented("memory"))
    found = next(f for f in doctor(ctx) if f["name"] == "memory reclaim")
    assert found["ok"], found
    return found["detail"]


def doctor(ctx):
    # The node's own environment, so that the findings are about the unit.
    variables = dict(entry.split("=", 1) for entry in Path(f"/proc/{ctx.node}/environ").read_text().split("\0") if entry)
    return json.loads(run("doze", "doctor", "--json", env=variables, user="doze"))["findings"]


@check
def doctor_finds_no_error(ctx):
    said = doctor(ctx)
    errors = [f for f in said if not f["ok"]]
    assert not errors, json.dumps(errors)
    limits = next(f["detail"] for f in said if f["name"] == "limits")
    assert limits == "cpu, memory and pids are enforced", limits
    return f"{len(said)} findings; {limits}"


@check
def doctor_reports_why_a_reboot_ends_memory(ctx):
    found = next(f["detail"] for f in doctor(ctx) if f["name"] == "checkpoint")
    reasons = found.removeprefix("a reboot ends the memory of sandboxes: ").split("; ")
    assert reasons == [
        "the kernel suspends their seccomp filters, as CRIU requires, only with CAP_SYS_ADMIN on the host",
        "podman refuses: checkpointing a container requires root",
        "criu is not installed",
    ], found
    return found


@check
def doctor_by_enter_finds_no_error(ctx):
    said = json.loads(run("/usr/lib/doze/enter", "--", "/usr/bin/doze", "doctor", "--json"))["findings"]
    errors = [f for f in said if not f["ok"]]
    assert not errors, json.dumps(errors)
    return f"{len(said)} findings"


@check
def a_sandbox_has_its_limits(ctx):
    began = time.monotonic()
    ctx.lite = Sandbox.create("lite", "lite")
    took = time.monotonic() - began
    assert ctx.lite.limits() == LITE, ctx.lite.limits()
    return f"{LITE}; created in {took:.1f} s"


@check
def previews_answer(ctx):
    ctx.other = Sandbox.create("other", "basic")
    ctx.lite.serve()
    ctx.other.serve()
    return ctx.other.url


@check
def nothing_runs_as_root(ctx):
    user = pwd.getpwnam("doze").pw_uid
    all_of_it = processes(UNIT)
    as_root = [p for p in all_of_it if 0 in p.uids]
    assert not as_root, as_root
    node = next(p for p in all_of_it if p.pid == main_pid())
    assert node.uids == {user}, node
    own = [p for p in processes(ctx.lite.cgroup) if p.inner == 1]
    assert user not in own[0].uids, f"the sandbox's root is the node's user: {own}"
    return f"{len(all_of_it)} processes: doze ({user}) and sub-uids ({own[0].uids})"


@check
def cpu_is_limited(ctx):
    before = keyed(ctx.lite.cgroup / "cpu.stat")
    began = time.monotonic()
    ctx.lite.exec("timeout 4 sh -c 'while :; do :; done'; true")
    took = time.monotonic() - began
    after = keyed(ctx.lite.cgroup / "cpu.stat")
    throttled = after["nr_throttled"] - before["nr_throttled"]
    share = (after["usage_usec"] - before["usage_usec"]) / 1e6 / took
    assert throttled > 0 and share < 0.35, f"{share:.2f} CPUs, throttled {throttled} times"
    return f"{share:.2f} CPUs, throttled {throttled} times"


@check
def memory_over_the_limit_kills_only_its_process(ctx):
    began = keyed(ctx.lite.cgroup / "memory.events")["oom_kill"]
    result = ctx.lite.exec("dd if=/dev/zero of=/dev/null bs=400M count=1; echo ended $?")
    assert "ended 137" in result["stdout"], result
    kills = keyed(ctx.lite.cgroup / "memory.events")["oom_kill"] - began
    assert kills == 1, f"{kills} kills"
    ctx.lite.same()
    ctx.other.same()
    assert main_pid() == ctx.node and unit("NRestarts") == "0", "the node was restarted"
    return "dd killed (137); sandbox, node and the other sandbox unharmed"


@check
def fork_bomb_ends_at_its_limit(ctx):
    began = keyed(ctx.lite.cgroup / "pids.events")["max"]
    # The engine also sets RLIMIT_NPROC, which would refuse first: this is about
    # the controller.
    run("prlimit", "--pid", str(ctx.lite.init()), "--nproc=unlimited")
    # awk goes on when it cannot fork; a shell would end.
    bomb = """exec awk 'BEGIN { while (1) system("sleep 600 &") }'"""
    api("POST", f"/sandbox/{ctx.lite.id}/process", {"command": bomb})

    def refused():
        return keyed(ctx.lite.cgroup / "pids.events")["max"] - began

    until("the limit to be reached", refused)
    peak = int((ctx.lite.cgroup / "pids.peak").read_text())
    assert peak <= 128, f"peak {peak}"
    ctx.other.same()
    assert main_pid() == ctx.node and unit("NRestarts") == "0", "the node was restarted"

    told = refused()
    api("POST", f"/sandbox/{ctx.lite.id}/stop")
    assert not processes(ctx.lite.cgroup), "processes outlived the stop"
    woke, _ = ctx.lite.visit()
    assert woke == "cold", woke
    ctx.lite.remember()
    now = int((ctx.lite.cgroup / "pids.current").read_text())
    return f"peak {peak}, {told} forks refused; after stop and cold wake {now}"


@check
def a_preview_thaws(ctx):
    frozen, waits = ctx.other.cgroup / "cgroup.events", []
    for _ in range(10):
        assert api("POST", f"/sandbox/{ctx.other.id}/sleep")["state"] == "asleep"
        assert keyed(frozen)["frozen"] == 1, "asleep, but not frozen"
        woke, took = ctx.other.same()
        assert woke == "warm", woke
        assert keyed(frozen)["frozen"] == 0, "awake, but frozen"
        waits.append(took)
    waits.sort()
    return f"wake p50 {waits[5]:.2f} ms, most {waits[-1]:.2f} ms"


@check
def reload_applies_the_caddyfile(ctx):
    text = CADDYFILE.read_text()
    CADDYFILE.write_text(text + "\nhttp://127.0.0.1:9180 {\n\tbind 127.0.0.1\n\tmetrics\n}\n")
    began = time.monotonic()
    run("systemctl", "reload", "doze")
    took = time.monotonic() - began
    assert unit("ActiveState") == "active" and main_pid() == ctx.node, "the reload ended the node"
    metrics = http.client.HTTPConnection("127.0.0.1", 9180, timeout=WAIT)
    try:
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read().decode()
    finally:
        metrics.close()
    assert "doze_" in text, "no metrics of doze"
    for sandbox in (ctx.lite, ctx.other):
        sandbox.same()
    return f"{took:.1f} s"


HELD = 200_000_000  # bytes of the app below


@check
def sleeping_sandbox_gives_its_memory_back(ctx):
    """The figure: of 200 MB that an app holds, at most a quarter stays resident."""
    with_options("reclaim_after 2s")
    big = Sandbox.create("big", "basic")
    # dd reads all of it before it writes. The text compresses well: the figure is about
    # the reclaim, and not about zram.
    text = """yes "$(seq -f '{"id": %.0f, "name": "user", "active": true}' 100 185)\""""
    api("POST", f"/sandbox/{big.id}/process", {
        "command": f"mkfifo /tmp/go; {text} | dd bs={HELD} count=1 iflag=fullblock | (read go </tmp/go; md5sum >/tmp/sum)"
    })  # fmt: skip
    current = big.cgroup / "memory.current"
    until("the app to hold its memory", lambda: int(current.read_text()) > HELD)
    api("POST", f"/sandbox/{big.id}/sleep")
    event = until("its memory to be reclaimed", lambda: next((e for e in big.events() if e["type"] == "memory_reclaimed"), None))
    resident, swapped = int(current.read_text()), int((big.cgroup / "memory.swap.current").read_text())
    zram = int(Path("/sys/block/zram0/mm_stat").read_text().split()[2])
    assert resident <= HELD / 4, f"{resident} bytes of {HELD} are resident, {swapped} in swap: {event}"
    assert zram <= swapped / 2, f"zram takes {zram} bytes for {swapped}"
    assert event["memory_before"] > HELD and event["memory_after"] <= HELD / 4, event
    assert big.state() == "asleep" and keyed(big.cgroup / "cgroup.events")["frozen"] == 1, big.state()
    assert big.limits()["memory.swap.max"] == "0", big.limits()
    # The app continues with its memory.
    began = time.monotonic()
    big.exec("echo >/tmp/go; while ! [ -s /tmp/sum ]; do sleep 0.1; done", timeout="110s")
    took = time.monotonic() - began
    sums = big.exec(f"cat /tmp/sum; {text} | head -c {HELD} | md5sum", timeout="110s")["stdout"].split()
    assert len(sums) == 4 and sums[0] == sums[2], sums
    assert [e["kind"] for e in big.events() if e["type"] == "woke"] == ["warm"], big.events()
    api("DELETE", f"/sandbox/{big.id}")
    with_options()
    return (
        f"memory of a sleeping sandbox whose app holds 200 MB, with zram: {100 * resident / HELD:.0f} % of it resident (bar 25 %); "
        f"{swapped / 1e6:.0f} MB moved in {event['duration_ms'] / 1000:.1f} s, zram takes {zram / 1e6:.0f} MB; all read again after the wake in {took:.1f} s"
    )


# Holds memory until less than a share of the machine's is available, and goes on with that until
# its standard input ends.
HOG = """
import select, sys
held = []
def memory():
    return {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/meminfo")}
while not select.select([sys.stdin], [], [], 0.02)[0]:
    m = memory()
    if m["MemAvailable"] < float(sys.argv[1]) * m["MemTotal"]:
        continue
    held.append(b"x" * (4 << 20))
"""


@check
def memory_pressure_stops_the_longest_asleep(ctx):
    run("swapoff", "/dev/zram0")
    kills = keyed(Path("/proc/vmstat"))["oom_kill"]
    for sandbox in (ctx.other, ctx.lite):
        api("POST", f"/sandbox/{sandbox.id}/sleep")
    hog = subprocess.Popen(["choom", "-n", "1000", "--", "python3", "-c", HOG, "0.04"], stdin=subprocess.PIPE)
    try:
        until("both to be stopped", lambda: ctx.other.state() == ctx.lite.state() == "stopped")
        assert hog.poll() is None, "the hog has ended"
    finally:
        hog.stdin.close()
        hog.wait(WAIT)
    stops = [next(e for e in reversed(sandbox.events()) if e["type"] == "stopped") for sandbox in (ctx.other, ctx.lite)]
    assert [e["reason"] for e in stops] == ["memory_pressure"] * 2, stops
    assert stops[0]["time"] < stops[1]["time"], stops
    assert keyed(Path("/proc/vmstat"))["oom_kill"] == kills, "the kernel's OOM killer has chosen"
    assert main_pid() == ctx.node and unit("NRestarts") == "0", "the node was restarted"
    until("the pressure to end", lambda: "doze_memory_pressure 0" in metrics())
    run("swapon", "--priority", "100", "/dev/zram0")
    for sandbox in (ctx.lite, ctx.other):
        woke, _ = sandbox.visit()
        assert woke == "cold", woke
        sandbox.remember()
    return stops[0]["detail"]


def metrics():
    return run("curl", "-sf", "--unix-socket", str(HOME / "admin.sock"), "http://localhost/metrics")


def with_options(*options):
    """Reloads the node with more options of doze than the Caddyfile of the machine has."""
    text = (TREE / "Caddyfile").read_text()
    before, middle, after = text.partition("\tdoze {\n")
    CADDYFILE.write_text(before + middle + "".join(f"\t\t{option}\n" for option in options) + after)
    run("systemctl", "reload", "doze")


def helpers():
    """How many processes there are: one Podman service and one namespace
    helper at most, whatever went before, and none is root's."""
    all_of_it = processes(UNIT)
    assert not [p for p in all_of_it if 0 in p.uids], "something runs as root"
    for what in ("system service", "doze-netns"):
        # A probe of Podman's user namespace ends by itself.
        found = [p for p in all_of_it if what in p.command and "sandboxes" not in p.command and " probe" not in p.command]
        assert len({p.command for p in found}) <= 1 and len(found) <= 2, found
    return len(all_of_it)


def unharmed(ctx):
    woke = [sandbox.same()[0] or "awake" for sandbox in (ctx.lite, ctx.other)]
    return f"{', '.join(woke)}; {helpers()} processes"


@check
def restart_leaves_sandboxes_alone(ctx):
    began = time.monotonic()
    run("systemctl", "restart", "doze")
    took = time.monotonic() - began
    assert up() and main_pid() != ctx.node, "it is not another process that answers"
    ctx.node = main_pid()
    return f"{took:.1f} s; {unharmed(ctx)}"


@check
def kill_of_the_node_is_survived(ctx):
    for sandbox in (ctx.lite, ctx.other):
        sandbox.same()  # awake
    os.kill(ctx.node, 9)
    began = time.monotonic()
    until("systemd to start it again", lambda: main_pid() not in (0, ctx.node) and up())
    took = time.monotonic() - began
    ctx.node = main_pid()
    assert ctx.lite.state() == "running", ctx.lite.state()
    return f"up again after {took:.1f} s; {unharmed(ctx)}"


@check
def stop_ends_the_node_only(ctx):
    api("POST", f"/sandbox/{ctx.lite.id}/sleep")
    began = time.monotonic()
    run("systemctl", "stop", "doze")
    took = time.monotonic() - began
    assert unit("ActiveState") == "inactive" and unit("Result") == "success", f"{unit('ActiveState')}, {unit('Result')}"
    left = [p for p in processes(UNIT) if "doze-node run" in p.command or "system service" in p.command]
    assert not left, left
    for sandbox in (ctx.lite, ctx.other):
        assert sandbox.init() == sandbox.first
        assert keyed(sandbox.cgroup / "cgroup.events")["frozen"] == 1, f"{sandbox.name} is not frozen"
    return f"{took:.1f} s; sandboxes frozen"


@check
def start_finds_them_again(ctx):
    began = time.monotonic()
    run("systemctl", "start", "doze")
    took = time.monotonic() - began
    assert up()
    ctx.node = main_pid()
    # The one was put to sleep because of a request, the other only
    # because the node ended.
    states = ctx.lite.state(), ctx.other.state()
    assert states == ("asleep", "running"), states
    return f"{took:.1f} s; {unharmed(ctx)}"


@check
def documented_start_reload_logs_and_stop_work(ctx):
    commands = documented("control")
    said = follow(*commands)
    assert '"msg":' in said, f"no log: {said}"
    assert unit("ActiveState") == "inactive", unit("ActiveState")
    follow(commands[0])
    until("the node", up)
    ctx.node = main_pid()
    return f"{len(commands)} commands; {unharmed(ctx)}"


@check
def documented_doctor_finds_no_error(ctx):
    return follow(*documented("doctor")).splitlines()[-1]


@check
def documented_change_of_the_token_works(ctx):
    before = (HOME / "token").read_text()
    follow(*documented("token"))
    until("the node", up)
    ctx.node = main_pid()
    assert (HOME / "token").read_text() != before, "the token is the old one"
    return unharmed(ctx)


def keys():
    """The keys that secrets are sealed with, the current one first."""
    return [line for line in (HOME / "egress/seal.key").read_text().splitlines() if not line.startswith("#")]


@check
def documented_change_of_the_sealing_key_works(ctx):
    api("PUT", "/secrets/vm", {"value": "0123456789", "hosts": ["a.example.com"]})
    (old,) = keys()
    follow(*documented("seal"))
    until("the node", up)
    new, second = keys()
    assert second == old != new, "the old key does not follow a new one"
    follow(*documented("seal-remove"))
    until("the node", up)
    ctx.node = main_pid()
    assert keys() == [new], "the old key is left"
    secret = api("GET", "/secrets/vm")
    assert not secret.get("unreadable"), secret
    return unharmed(ctx)


@check
def documented_upgrade_works(ctx):
    # The machine has no repository and no compiler, and its image is another one.
    commands = documented("upgrade", "git pull", "make build", "images/build")
    assert len(commands) == 4, commands
    follow(*commands)
    until("the node", up)
    assert main_pid() != ctx.node, "the node was not restarted"
    ctx.node = main_pid()
    return f"{len(commands)} commands; {unharmed(ctx)}"


@check
def documented_backup_and_restore_work(ctx):
    commands = documented("backup")
    assert len(commands) == 4 and commands[1] == "systemctl stop doze", commands
    follow(*commands[:-1])
    archived = set(run("tar", "-tf", str(TREE / "doze.tar")).splitlines())
    for wanted in ("var/lib/doze/token", "var/lib/doze/egress/seal.key", "var/lib/doze/.local/share/containers/storage/overlay/"):
        assert wanted in archived, f"the archive lacks {wanted}"
    run("find", str(HOME), "-mindepth", "1", "-delete")
    follow(*documented("restore"), commands[-1])
    until("the node", up)
    ctx.node = main_pid()
    for sandbox in (ctx.lite, ctx.other):
        assert sandbox.state() == "stopped", sandbox.state()
        woke, _ = sandbox.visit()
        assert woke == "cold", woke
        sandbox.remember()
    return f"{len(commands)} commands, {len(archived)} files"


@check_after_reboot
def sandboxes_do_not_hold_up_the_reboot(ctx):
    # systemd kills processes 90 s after SIGTERM, and frozen ones do not receive
    # SIGTERM.
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    took = time.time() - uptime - ctx.left
    assert took < 60, f"the machine took {took:.0f} s to go down"
    return f"the machine was down after {took:.0f} s"


@check_after_reboot
def the_node_starts_at_boot(ctx):
    until("the node", up)
    node = next(p for p in processes(UNIT) if p.pid == main_pid())
    assert node.uids == {pwd.getpwnam("doze").pw_uid}, node
    return f"{float(unit('ActiveEnterTimestampMonotonic')) / 1e6:.0f} s after the kernel"


@check_after_reboot
def previews_wake_what_the_reboot_stopped(ctx):
    states = [sandbox.state() for sandbox in (ctx.lite, ctx.other)]
    assert states == ["stopped", "stopped"], states
    waits = []
    for sandbox in (ctx.lite, ctx.other):
        woke, took = sandbox.visit()
        assert woke == "cold", f"{sandbox.name}: {woke}"
        waits.append(took)
    assert ctx.lite.limits() == LITE, ctx.lite.limits()
    return f"cold wakes {', '.join(f'{took / 1000:.1f} s' for took in waits)}; limits as before"


@check_after_reboot
def destroy_leaves_nothing(ctx):
    for sandbox in (ctx.lite, ctx.other):
        api("DELETE", f"/sandbox/{sandbox.id}")
        assert not sandbox.cgroup.exists(), f"{sandbox.cgroup} is still there"
    return f"{helpers()} processes"


@check_after_reboot
def documented_uninstalling_leaves_nothing(ctx):
    Sandbox.create("left", "lite")
    commands = documented("uninstall")
    follow(*commands)
    left = [p for p in (HOME, CADDYFILE, Path("/usr/lib/doze"), Path("/usr/bin/doze"), Path("/run/doze"), UNIT) if os.path.lexists(p)]
    assert not left, left
    try:
        pwd.getpwnam("doze")
    except KeyError:
        return f"{len(commands)} commands"
    raise AssertionError("user doze is left")


class Context:
    """State that the checks share."""

    def keep(self):
        KEPT.write_text(json.dumps([time.time(), *([s.name, s.id, s.url] for s in (self.lite, self.other))]))

    def read(self):
        self.left, *sandboxes = json.loads(KEPT.read_text())
        for name, id, url in sandboxes:
            setattr(self, name, Sandbox(name, id, url))


def failures(checks, ctx):
    """Runs them all; returns the names of those that failed."""
    failed = []
    for function in checks:
        name = function.__name__.replace("_", " ")
        try:
            print(f"PASS {name}: {function(ctx)}", flush=True)
        except Exception as err:  # a failed check raises
            failed.append(name)
            print(f"FAIL {name}: {type(err).__name__}: {err}", flush=True)
            print("".join(traceback.format_tb(err.__traceback__)), flush=True)
            print(run("journalctl", "--no-pager", "--boot", "--unit", "doze", "--lines", "15"), flush=True)
    return failed


def main():
    again = KEPT.exists()
    ctx = Context()
    if again:
        ctx.read()
    failed = failures(AFTER if again else BEFORE, ctx)
    if failed:
        print(run("journalctl", "--no-pager", "--boot", "--unit", "doze", "--lines", "150"))
        print(f"RESULT FAIL: {', '.join(failed)}", flush=True)
    elif again:
        print("RESULT PASS", flush=True)
    else:
        ctx.keep()
        Path("/run/doze-vm-reboots").touch()
        run("systemctl", "reboot")


if __name__ == "__main__":
    main()
