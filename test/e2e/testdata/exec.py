"""Drives `doze exec` as programs do: python3 exec.py DOZE SANDBOX"""
import subprocess
import sys

doze, sandbox = sys.argv[1:3]


def start(*command):
    return subprocess.Popen([doze, "exec", sandbox, "--", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# Input that stays open does not keep the command from running.
p = start("sh", "-c", "echo up; exit 3")
assert p.stdout.readline() == b"up\n"
assert p.wait() == 3

# An interpreter answers line by line.
p = start("python3", "-uc", "import sys\nfor line in sys.stdin: print(eval(line))")
for i in range(20):
    p.stdin.write(b"%d * 7\n" % i)
    p.stdin.flush()
    assert p.stdout.readline() == b"%d\n" % (i * 7)
p.stdin.close()
assert p.stdout.read() == b"" and p.wait() == 0

# What needs all of its input gets it, and its end.
lines = [b"%d\n" % (i * 7919 % 100003) for i in range(100003)]
p = start("sort", "-n")
out, _ = p.communicate(b"".join(lines))
assert out == b"".join(b"%d\n" % i for i in range(100003)) and p.returncode == 0

# Bytes are bytes.
every = bytes(range(256)) * 1000
out, _ = start("cat").communicate(every)
assert out == every
print("ok")
