package server

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// maxPortWait bounds how long one request waits for a port.
const maxPortWait = time.Hour

// portPolls are the pauses between polls of a port; the last one repeats. They
// do not grow: a server that is up should not wait for the guest.
var portPolls = [...]time.Duration{2 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond}

func (s *Server) portReady(r *http.Request) (any, error) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		return nil, refuse(guest.CodeInvalid, "port %.20q is unusable; it is a number from 1 to 65535", r.URL.Query().Get("port"))
	}
	wait, err := durationOf(r, "wait", maxPortWait)
	if err != nil {
		return nil, err
	}
	if !waitForPort(r.Context(), uint16(port), wait) {
		return nil, refuse(guest.CodePortNotReady, "nothing listens on port %d after %s", port, wait)
	}
	return struct{}{}, nil
}

// waitForPort polls after 0, 2, 5, 10, 20 and then every 25 ms.
func waitForPort(ctx context.Context, port uint16, wait time.Duration) bool {
	expired := time.After(wait)
	for i := 0; !listening(port); i = min(i+1, len(portPolls)-1) {
		select {
		case <-time.After(portPolls[i]):
		case <-expired:
			return listening(port)
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// listening reports whether a TCP socket listens on the port, on any address.
func listening(port uint16) bool {
	return listed("/proc/net/tcp", port) || listed("/proc/net/tcp6", port)
}

// listed searches a table of the kernel for a listening socket. Its lines are
// "sl local_address rem_address st …" with hexadecimal ADDRESS:PORT, and st 0A
// for listening.
func listed(table string, port uint16) bool {
	f, err := os.Open(table)
	if err != nil {
		return false
	}
	defer f.Close()
	want := fmt.Appendf(nil, ":%04X", port)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := bytes.Fields(lines.Bytes())
		if len(fields) > 3 && bytes.HasSuffix(fields[1], want) && string(fields[3]) == "0A" {
			return true
		}
	}
	return false
}
