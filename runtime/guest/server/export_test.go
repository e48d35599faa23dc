package server

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"time"
)

// EndDrainingAtOnce has the output of each ended command drained for no time, as if its
// client had taken longer than drainMax.
func (c *Config) EndDrainingAtOnce() { c.drain = time.Nanosecond }

// Close closes the sockets of a Server that is not served.
func (s *Server) Close() error {
	s.reaper.close()
	return errors.Join(s.socket.Close(), s.holdSocket.Close())
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
