"""Says bytes to a server and prints what comes back.

say.py tcp HOST PORT           what standard input has, as it is
say.py tls HOST PORT SNI       the same in TLS; SNI - names no server
say.py udp HOST PORT           one datagram, and waits for one
say.py ping HOST               asks for an echo of standard input (ICMP), as ping does
say.py ws HOST PORT PATH       a WebSocket, of which it prints the messages
"""
import base64, os, socket, ssl, struct, sys

PATIENCE = 30  # decides only how long a broken server keeps a test
QUIET = 0.5  # after which a server that has answered says no more


def everything(conn):
    """What comes until the end, or until nothing more does."""
    data = b""
    while True:
        try:
            part = conn.recv(65536)
        except TimeoutError:
            if data:
                return data
            raise
        if not part:
            return data
        data += part
        conn.settimeout(QUIET)


def secure(conn, name):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context.wrap_socket(conn, server_hostname=name)


def messages(data):
    """The payloads of a server's frames, put together, and whether it said its last."""
    joined = b""
    while len(data) >= 2:
        size, at = data[1] & 0x7F, 2
        if size == 126:
            size, at = struct.unpack(">H", data[2:4])[0], 4
        elif size == 127:
            size, at = struct.unpack(">Q", data[2:10])[0], 10
        if len(data) < at + size:
            break
        if data[0] & 0x0F == 8:
            return joined, True
        if data[0] & 0x0F < 8:
            joined += data[at : at + size]
        data = data[at + size :]
    return joined, False


def ping(host):
    """What comes back of an echo request. The kernel fills in its number and checksum."""
    conn = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    conn.settimeout(PATIENCE)
    conn.connect((host, 0))
    conn.send(struct.pack(">BBHHH", 8, 0, 0, 0, 1) + sys.stdin.buffer.read())
    answer = conn.recv(65536)
    if answer[0] != 0:
        raise OSError(f"an answer of type {answer[0]}")
    return answer[8:]


def main(how, host, port=0, *more):
    if how == "ping":
        sys.stdout.buffer.write(ping(host))
        return
    kind = socket.SOCK_DGRAM if how == "udp" else socket.SOCK_STREAM
    conn = socket.socket(socket.AF_INET, kind)
    conn.settimeout(PATIENCE)
    conn.connect((host, int(port)))
    if how == "tls":
        conn = secure(conn, None if more[0] == "-" else more[0])
    if how == "udp":
        conn.send(sys.stdin.buffer.read())
        sys.stdout.buffer.write(conn.recv(65536))
        return
    if how == "ws":
        conn = secure(conn, host)
        key = base64.b64encode(os.urandom(16)).decode()
        conn.sendall(
            f"GET {more[0]} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        data, joined, last = b"", b"", False
        while not last:
            part = conn.recv(65536)
            data += part
            joined, last = messages(data.partition(b"\r\n\r\n")[2])
            last = last or not part
        sys.stdout.buffer.write(data + b"\n" + joined)
        return
    conn.sendall(sys.stdin.buffer.read())
    sys.stdout.buffer.write(everything(conn))


try:
    main(*sys.argv[1:])
except OSError as e:
    print(type(e).__name__, e, file=sys.stderr)
    sys.exit(7)
