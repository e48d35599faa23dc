package podman

import (
	"bytes"
	"io"
	"log/slog"
	"os"
)

const (
	// maxServiceLog is the size in bytes at which the service's log file is truncated
	// after it was read.
	maxServiceLog = 1 << 20
	// maxTail is how much of the file is searched for its last line, in bytes.
	maxTail = 16 << 10
	// maxLine is the length in bytes to which lines of logs are truncated.
	maxLine = 1000
)

// logTail copies the lines of the service's log file to the node's log.
type logTail struct {
	path   string
	offset int64
	log    *slog.Logger
}

// drain logs the lines that were added since the last call.
func (l *logTail) drain() {
	f, err := os.OpenFile(l.path, os.O_RDWR, 0)
	if err != nil {
		return // a service of another process logs elsewhere
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
			l.log.Warn("podman service printed a line", "line", string(line[:min(len(line), maxLine)]))
		}
	}
	if l.offset >= maxServiceLog && f.Truncate(0) == nil {
		l.offset = 0
	}
}

// lastLine returns the last line of a file, truncated to maxLine bytes, or "" if it cannot be
// read.
func lastLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	_, _ = f.Seek(-maxTail, io.SeekEnd) // a shorter file is read from its start
	data, _ := io.ReadAll(io.LimitReader(f, maxTail))
	data = bytes.TrimRight(data, "\n")
	line := data[bytes.LastIndexByte(data, '\n')+1:]
	return string(line[:min(len(line), maxLine)])
}
