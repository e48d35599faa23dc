package server

import (
	"context"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/doze-run/doze/runtime/guest"
)

// DrainMax is how long the output of an ended command is read at most.
const DrainMax = drainMax

// Unpack is unpack as a client's archive meets it, for fuzzing without a socket.
func Unpack(ctx context.Context, folder string, body io.Reader) (guest.ArchiveResult, error) {
	return unpack(ctx, folder, "", body, false)
}

// AliveIn counts the living processes that work in a folder. Unlike those that
// carry a variable in their environment, they cannot easily get rid of it.
func AliveIn(folder string) (n int) {
	for _, p := range listProcs() {
		cwd, err := os.Readlink("/proc/" + strconv.Itoa(p.pid) + "/cwd")
		if err == nil && !p.dead && strings.HasPrefix(cwd, folder) {
			n++
		}
	}
	return n
}
