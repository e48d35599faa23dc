package podman

import (
	"bytes"
	"io"
	"log/slog"
	"os"
)

const (
	// maxServiceLog is the size in bytes at which the service's log file is
	// emptied, after it was read.
	maxServiceLog = 1 << 20
	// maxLine cuts lines of logs, in bytes.
	maxLine = 1000
)

// logTail hands on what the service writes into its log file.
type logTail struct {
	path   string
	offset int64
	log    *slog.Logger
}

func newLogTail(path string, log *slog.Logger) *logTail { return &logTail{path: path, log: log} }

// drain logs every line since the last time.
func (l *logTail) drain() {
	f, err := os.OpenFile(l.path, os.O_RDWR, 0)
	if err != nil {
		return // a service that was started elsewhere logs elsewhere
	}
	defer f.Close()
	data, err := io.ReadAll(io.NewSectionReader(f, l.offset, maxServiceLog))
	if err != nil {
		return
	}
	end := bytes.LastIndexByte(data, '\n') + 1
	if len(data) == maxServiceLog {
		end = len(data)
	}
	l.offset += int64(end)
	for line := range bytes.Lines(data[:end]) {
		if line = bytes.TrimSpace(line); len(line) > 0 {
			l.log.Warn("podman", "line", string(line[:min(len(line), maxLine)]))
		}
	}
	if l.offset >= maxServiceLog && f.Truncate(0) == nil {
		l.offset = 0
	}
}

// lastLine of a file, at most maxLine bytes of it; empty without one.
func lastLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	return lastLineOf(tail(f, 16<<10))
}

// tail reads the last n bytes of a file.
func tail(f *os.File, n int64) []byte {
	info, err := f.Stat()
	if err != nil {
		return nil
	}
	data, _ := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-n), n))
	return data
}

func lastLineOf(data []byte) string {
	data = bytes.TrimRight(data, "\n")
	line := data[bytes.LastIndexByte(data, '\n')+1:]
	return string(line[:min(len(line), maxLine)])
}
