package server

import (
	"bytes"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// The code of a session can write what it likes where its shell reports.
func FuzzSessionReports(f *testing.F) {
	f.Add([]byte("$ \x1e7 0\x1e"), 1, true)
	f.Add([]byte("sh: 1: cannot create /dev/null/\x1e7 130\x1e: Directory nonexistent\n"), 3, false)
	f.Add([]byte("\x1e6 1\x1e7 256\x1e7 -1\x1e7\x1e 7 2\x1e"), 5, false)
	f.Add([]byte("\x1e7 "+strings.Repeat("0", 100)+"3\x1e"), 60, true)
	f.Add(bytes.Repeat([]byte("\n# "), 1000), 1, false)
	f.Fuzz(func(t *testing.T, printed []byte, size int, bash bool) {
		input, shell, err := newPipe(writeEnd)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(shell)
		defer input.Close()
		c := &sessionCommand{number: 7, ended: make(chan struct{})}
		ss := &session{bash: bash, input: input, current: c}
		for rest := printed; len(rest) > 0; {
			part := rest[:min(len(rest), 1+(size&0xff))]
			rest = rest[len(part):]
			if err := ss.read(part); err != nil {
				t.Fatal(err)
			}
			if len(ss.partial) > maxReport+1 || c.requests > maxReportRequests {
				t.Fatalf("%d bytes are retained, %d requests", len(ss.partial), c.requests)
			}
		}
		code, reported := reportIn(printed, 7)
		if reported == c.running() || c.code != code {
			t.Errorf("%q ended the command: %v, with code %d; want %v, %d", printed, !c.running(), c.code, reported, code)
		}
	})
}

// reportIn returns the code of the first report of that command.
func reportIn(printed []byte, command int) (code int, reported bool) {
	texts := bytes.Split(printed, []byte{reportMark})
	for _, text := range texts[:len(texts)-1] {
		number, code, _ := strings.Cut(string(text), " ")
		value, err := strconv.ParseUint(code, 10, 8)
		if err == nil && number == strconv.Itoa(command) && len(text) <= maxReport {
			return int(value), true
		}
	}
	return 0, false
}
