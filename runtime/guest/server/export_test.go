package server

import (
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// EndDrainingAtOnce has the output of each ended command drained for no time, as if its
// client had taken longer than drainMax.
func (c *Config) EndDrainingAtOnce() { c.drain = time.Nanosecond }

// ForgetWatchesSoon has each watch without a client forgotten after some milliseconds.
func (c *Config) ForgetWatchesSoon() { c.retentionStep = time.Millisecond }

// AwaitSessionsBriefly has terminals wait for their sessions for some milliseconds.
func (c *Config) AwaitSessionsBriefly() { c.surroundings = 20 * time.Millisecond }

// HoldWatches stops the watches at their next event, until proceed is called.
func (s *Server) HoldWatches() (proceed func()) {
	s.watches.mu.Lock()
	defer s.watches.mu.Unlock()
	for _, w := range s.watches.all {
		w.mu.Lock()
	}
	all := slices.Collect(maps.Values(s.watches.all))
	return func() {
		for _, w := range all {
			w.mu.Unlock()
		}
	}
}

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

// Lines returns the complete lines in the output of a process that was written in these parts.
func Lines(parts ...[]byte) (lines []string) {
	var l line
	for _, part := range parts {
		l.add(part, func(text []byte) bool { lines = append(lines, plain(text)); return false })
	}
	return lines
}
